"""Quantized linear layers on a CPU without AMX: decoded once after loading, then plain.

Published FP8 and INT4 checkpoints quantize attention, too, and upstream has kernels for that on a GPU or with AMX only. Here
upstream's method creates and loads its parameters as ever; afterwards they become one matrix in the model's type. Such
layers take two to four times their size in the checkpoint; they are a few percent of an expert model.

A method (or scheme) of upstream's that this knows is a row in ``DECODERS``; every other keeps upstream's behaviour.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sglang.srt.lk.formats.base import E8M0
from sglang.srt.lk.formats.int4 import AWQ_PLACES, WORD, nibbles


def decoded(method: Any, layer: torch.nn.Module) -> Any:
    """The method, made to decode its layer after loading if it is one that this knows. It stays upstream's object, since
    upstream picks a layer's loader by the name of the method's class."""
    decode = DECODERS.get(type(method).__name__) or DECODERS.get(type(getattr(layer, "scheme", None)).__name__)
    if decode is not None:
        method.process_weights_after_loading = partial(_decode, method, decode)
        method.apply = _apply
    return method


def _decode(method: Any, decode: Callable[[Any, torch.nn.Module], torch.Tensor], layer: torch.nn.Module) -> None:
    weight = decode(method, layer).to(layer.params_dtype)
    for name, _ in list(layer.named_parameters(recurse=False)):
        if name != "bias":
            delattr(layer, name)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def _apply(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer.weight, bias)


def fp8(method: Any, layer: torch.nn.Module) -> torch.Tensor:
    """e4m3 with a scale per block, per row, or for each of the matrices that are stacked."""
    weight = layer.weight.to(torch.float32)
    scale = getattr(layer, "weight_scale_inv", None)
    scale = layer.weight_scale if scale is None else scale
    if scale.dtype in (torch.uint8, E8M0):
        scale = torch.exp2(scale.view(torch.uint8).to(torch.float32) - 127)
    if scale.dim() < 2 and scale.numel() == len(layer.logical_widths):
        scale = scale.flatten().repeat_interleave(torch.tensor(layer.logical_widths)).unsqueeze(1)
    blocks = getattr(method, "weight_block_size", None) or getattr(layer, "weight_block_size", None) or (1, weight.shape[1])
    rows = scale.repeat_interleave(blocks[0], 0)[: weight.shape[0]] if blocks[0] > 1 else scale.expand(weight.shape[0], -1)
    return weight * rows.repeat_interleave(blocks[1], 1)[:, : weight.shape[1]]


def gptq(method: Any, layer: torch.nn.Module) -> torch.Tensor:
    """Columns in any order: each has its group by name."""
    config = method.quant_config
    codes = nibbles(layer.qweight.T, range(WORD))
    more = 0 if config.checkpoint_format == "gptq_v2" else 1
    zeros = nibbles(layer.qzeros, range(WORD)).T + more
    group = layer.g_idx.long() if config.desc_act else torch.arange(codes.shape[1]) // (codes.shape[1] // zeros.shape[1])
    return (codes.to(torch.float32) - zeros[:, group]) * layer.scales.T.to(torch.float32)[:, group]


def awq(method: Any, layer: torch.nn.Module) -> torch.Tensor:
    codes = nibbles(layer.qweight, AWQ_PLACES).T
    zeros = nibbles(layer.qzeros, AWQ_PLACES).T
    return _grouped(codes, zeros, layer.scales.T)


def compressed_int4(method: Any, layer: torch.nn.Module) -> torch.Tensor:
    codes = nibbles(layer.weight_packed, range(WORD))
    points = getattr(layer, "weight_zero_point", None)
    zeros = torch.full_like(layer.weight_scale, 8) if points is None else nibbles(points.T, range(WORD)).T
    return _grouped(codes, zeros, layer.weight_scale)


def _grouped(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    size = codes.shape[1] // scales.shape[1]
    parts = codes.to(torch.float32).unflatten(1, (-1, size))
    return ((parts - zeros.unsqueeze(2)) * scales.to(torch.float32).unsqueeze(2)).flatten(1)


DECODERS: dict[str, Callable[[Any, torch.nn.Module], torch.Tensor]] = {
    "Fp8LinearMethod": fp8,
    "ModelOptFp8LinearMethod": fp8,
    "GPTQLinearMethod": gptq,
    "AWQLinearMethod": awq,
    "CompressedTensorsW8A8Fp8": fp8,
    "CompressedTensorsW8A16Fp8": fp8,
    "CompressedTensorsWNA16": compressed_int4,
}
