"""Expert weights in FP8 and 4-bit integers for the checkpoints: values that such a file and a BF16 one can both hold, and the tensors.

Scales have three significant bits, so that every product with a code (four bits of e4m3, or an integer of magnitude up to 15)
has at most seven and BF16 holds it: the BF16 checkpoint of the values and the quantized one are the same model.

A format is a row in ``FORMATS``: its function makes ``(values, tensors by suffix)`` of one ``[rows, columns]`` weight, its
configuration is what a publisher's ``config.json`` says of the quantization.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

AWQ_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours the nibbles of an AWQ word hold, lowest first
LARGEST = {"e4m3": 448.0, "int4": 7.0, "uint4": 15.0}
Made = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Quantized:
    make: Callable[[torch.Tensor], Made]
    config: dict
    model: dict = dataclasses.field(default_factory=dict)  # other sizes than the usual ones
    twin: torch.dtype = torch.bfloat16  # holds the values, too
    attention: bool = True  # is quantized, too


def coarse(scales: torch.Tensor) -> torch.Tensor:
    """Rounded up to three significant bits."""
    mantissa, exponent = torch.frexp(scales.double())
    return torch.ldexp(torch.ceil(mantissa * 8) / 8, exponent).float()


def power(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scales.double()))).float()


def in_blocks(value: torch.Tensor, high: int, wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitude of each block, and the same for every element."""
    rows, columns = (math.ceil(size / block) for size, block in zip(value.shape, (high, wide), strict=True))
    padded = torch.zeros(rows * high, columns * wide)
    padded[: value.shape[0], : value.shape[1]] = value.abs()
    table = padded.view(rows, high, columns, wide).amax((1, 3)).clamp_min(2.0**-9)
    return table, table.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: value.shape[0], : value.shape[1]]


def f16(value: torch.Tensor) -> Made:
    """Eleven bits, of which BF16 would lose three."""
    held = (value.float() * 1.001).to(torch.float16)
    return held.float(), {"weight": held}


def fp8(high: int, wide: int, suffix: str, *, round_scales=coarse, dtype=torch.float32, shape=None) -> Callable[[torch.Tensor], Made]:
    """e4m3 codes and a scale for each block."""

    def make(value: torch.Tensor) -> Made:
        table, every = (round_scales(part / LARGEST["e4m3"]) for part in in_blocks(value.float(), min(high, value.shape[0]), min(wide, value.shape[1])))
        codes = (value.float() / every).to(torch.float8_e4m3fn)
        held = (torch.log2(table) + 127).to(torch.uint8) if dtype is torch.uint8 else table.to(dtype)
        return codes.float() * every, {"weight": codes, suffix: held.reshape(shape) if shape is not None else held}

    return make


def int4(group: int, pack: Callable[..., dict[str, torch.Tensor]], *, zeros: bool, dtype=torch.float16) -> Callable[[torch.Tensor], Made]:
    """4-bit codes and scales (and zero points) per row and group, in the tensors of ``pack``."""

    def make(value: torch.Tensor) -> Made:
        size = value.shape[1] if group == -1 else group
        parts = value.float().unflatten(1, (-1, size))
        low, high = parts.amin(2).clamp_max(-1e-3), parts.amax(2).clamp_min(1e-3)
        if zeros:
            scales = coarse((high - low) / 14)
            points = torch.round(-low / scales).clamp(1, 15)
        else:
            scales = coarse(torch.maximum(high, -low) / 7)
            points = torch.full_like(scales, 8)
        codes = (torch.round(parts / scales.unsqueeze(2)) + points.unsqueeze(2)).clamp(0, 15)
        values = ((codes - points.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)
        return values, pack(codes.flatten(1).long(), points.long() if zeros else None, scales.to(dtype))

    return make


def words(values: torch.Tensor, places=range(8)) -> torch.Tensor:
    """int32 words of eight neighbours in a row: nibble n holds neighbour ``places[n]``."""
    eight = values.unflatten(1, (-1, 8))[..., list(places)]
    total = (eight << (4 * torch.arange(8))).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def awq(codes, points, scales) -> dict[str, torch.Tensor]:
    return {"qweight": words(codes.T, AWQ_COLUMN), "qzeros": words(points.T, AWQ_COLUMN), "scales": scales.T.contiguous()}


def gptq(more: int = 1) -> Callable[..., dict[str, torch.Tensor]]:
    def pack(codes, points, scales) -> dict[str, torch.Tensor]:
        points = torch.full_like(scales, 8, dtype=torch.long) if points is None else points
        order = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])
        return {
            "qweight": words(codes).T.contiguous(),
            "qzeros": words(points.T - more),
            "scales": scales.T.contiguous(),
            "g_idx": order,
        }

    return pack


def compressed(codes, points, scales) -> dict[str, torch.Tensor]:
    tensors = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    return tensors | ({"weight_zero_point": words(points.T).T.contiguous()} if points is not None else {})


def compressed_config(format: str, weights: dict, activations: dict | None = None) -> dict:
    group = dict(targets=["Linear"], weights=dict(dynamic=False, **weights), input_activations=activations, output_activations=None)
    ignored = ["lm_head", "re:.*mlp.gate$"]
    return dict(quant_method="compressed-tensors", format=format, config_groups={"group_0": group}, ignore=ignored,
                quantization_status="compressed")  # fmt: skip


_ATTENTION = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkvo"]
_FP8 = dict(quant_method="fp8", activation_scheme="dynamic", modules_to_not_convert=["lm_head"])
_MXFP8 = _FP8 | dict(quant_method="mxfp8", modules_to_not_convert=_ATTENTION + ["lm_head"])
_TOKENS = dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
_AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm",
            modules_to_not_convert=["lm_head"])  # fmt: skip
_GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True, lm_head=False, dynamic={})
_EVERY = 1 << 20

FORMATS: dict[str, Quantized] = {
    "f16": Quantized(f16, {}, twin=torch.float32, attention=False),
    "fp8_block": Quantized(  # the last blocks are halves
        fp8(64, 64, "weight_scale_inv"), _FP8 | dict(weight_block_size=[64, 64]), dict(moe_intermediate_size=96)
    ),
    "fp8_tensor": Quantized(fp8(_EVERY, _EVERY, "weight_scale", shape=()), _FP8),
    "fp8_modelopt": Quantized(
        fp8(_EVERY, _EVERY, "weight_scale", shape=()),
        dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head", "*mlp.gate"]),
    ),
    "fp8_channel": Quantized(
        fp8(1, _EVERY, "weight_scale"),
        compressed_config("float-quantized", dict(num_bits=8, type="float", strategy="channel", symmetric=True), _TOKENS),
    ),
    "mxfp8": Quantized(fp8(1, 32, "weight_scale_inv", round_scales=power, dtype=torch.uint8), _MXFP8, attention=False),
    "awq": Quantized(int4(32, awq, zeros=True), _AWQ),
    "gptq": Quantized(int4(32, gptq(), zeros=False), _GPTQ),
    "gptq_zeros": Quantized(int4(32, gptq(), zeros=True), _GPTQ | dict(sym=False)),
    "gptq_v2_channel": Quantized(
        int4(-1, gptq(0), zeros=True),
        _GPTQ | dict(sym=False, group_size=-1, checkpoint_format="gptq_v2", dynamic={r"-:.*self_attn.*": {}}),
        attention=False,  # upstream's linear layers on a CPU do not know this version
    ),
    "auto_round": Quantized(
        int4(32, gptq(), zeros=False),
        dict(quant_method="auto-round", bits=4, group_size=32, sym=True, packing_format="auto_round:auto_gptq",
             block_name_to_quantize="model.layers"),
    ),
    "int4": Quantized(
        int4(64, compressed, zeros=False, dtype=torch.bfloat16),
        compressed_config("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=64, symmetric=True)),
    ),
    "int4_zeros": Quantized(
        int4(32, compressed, zeros=True, dtype=torch.bfloat16),
        compressed_config("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)),
    ),
    "int4_channel": Quantized(
        int4(-1, compressed, zeros=False, dtype=torch.bfloat16),
        compressed_config("pack-quantized", dict(num_bits=4, type="int", strategy="channel", symmetric=True)),
    ),
}
