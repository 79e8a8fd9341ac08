"""Random layers in checkpoint form as torch tensors, stores filled with them, and the float64 answer.

The values come from the kernels' own reference; here they only change clothes. No model and nothing from upstream.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

import written
from sglang.srt.lk import formats, kernels
from sglang.srt.lk.formats import CODES, SCALES, Geometry
from sglang.srt.lk.loading import ExpertLoader
from sglang.srt.lk.store import LayerStore, Progress

SHARD = {"gate": "w1", "up": "w3", "down": "w2"}
NAME = "model.layers.3.mlp.experts"


def _reference() -> ModuleType:
    """By path: another folder of tests has a module of the same name."""
    file = Path(__file__).parents[1] / "native" / "reference.py"
    spec = importlib.util.spec_from_file_location("native_reference", file)
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, "Layer"):
        spec.loader.exec_module(module)
    return module


reference = _reference()


class Case:
    """A format and how to make matrices of it; ``stored`` are the checkpoint's types where the packing depends on them."""

    def __init__(self, format, make=None, **stored):
        self.format, self.make = format, make
        self.stored = {CODES: stored.get("codes"), SCALES: stored.get("scales")}
        self.dtype = stored.get("model", torch.bfloat16)


def _int4(kind, group, **how):
    return lambda *shape: written.int4(*shape, kind, group, **how)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "bf16": Case(formats.Unquantized()),
    "f16": Case(formats.Unquantized(), written.half, codes=F16, model=F16),
    "fp8_block_32_32": Case(formats.Fp8Block(32, 32), lambda *shape: written.fp8_block(*shape, (32, 32))),
    "fp8_block_128_128": Case(formats.Fp8Block(128, 128), lambda *shape: written.fp8_block(*shape, (128, 128), BF16)),
    "fp8_block_24_64": Case(formats.Fp8Block(24, 64), lambda *shape: written.fp8_block(*shape, (24, 64))),
    "fp8_block_1_96": Case(formats.Fp8Block(1, 96, "weight_scale"), lambda *shape: written.fp8_block(*shape, (1, 96), F16)),
    "fp8_tensor": Case(formats.Fp8Tensor(), written.fp8_tensor),
    "fp8_channel": Case(formats.Fp8Channel(), written.fp8_channel),
    "mxfp8": Case(formats.Mxfp8(), written.mxfp8),
    "mxfp4": Case(formats.Mxfp4()),
    "deepseek_mxfp4": Case(formats.DeepseekMxfp4()),
    "modelopt_nvfp4": Case(formats.ModelOptNvfp4()),
    "compressed_nvfp4": Case(formats.CompressedTensorsNvfp4()),
    "awq": Case(formats.Awq(group=32, zero_points=True), _int4("awq", 32, zeros=True), scales=F16),
    "awq_channel": Case(formats.Awq(group=-1, zero_points=True), _int4("awq", -1, zeros=True)),
    "gptq": Case(formats.Gptq(group=32, zero_points=False), _int4("gptq", 32, zeros=False), scales=F16),
    "gptq_ordered": Case(formats.Gptq(group=32, zero_points=False, ordered=True), _int4("gptq", 32, zeros=False)),
    "gptq_zeros": Case(formats.Gptq(group=32, zero_points=True), _int4("gptq", 32, zeros=True), scales=F16),
    "gptq_v2": Case(formats.Gptq(group=32, zero_points=True, more=0), _int4("gptq", 32, zeros=True, more=0), scales=F16),
    "gptq_channel": Case(formats.Gptq(group=-1, zero_points=False), _int4("gptq", -1, zeros=False)),
    "compressed_int4": Case(
        formats.CompressedTensorsInt4(group=32, zero_points=False), _int4("compressed", 32, zeros=False, dtype=BF16), scales=BF16
    ),
    "compressed_int4_zeros": Case(
        formats.CompressedTensorsInt4(group=32, zero_points=True), _int4("compressed", 32, zeros=True, dtype=F32), scales=F32
    ),
    "compressed_int4_channel": Case(
        formats.CompressedTensorsInt4(group=-1, zero_points=False), _int4("compressed", -1, zeros=False, dtype=BF16)
    ),
    "compressed_int4_channel_zeros": Case(
        formats.CompressedTensorsInt4(group=-1, zero_points=True), _int4("compressed", -1, zeros=True, dtype=F32)
    ),
}


def random_layer(case, *, experts=4, hidden=64, width=96, seed=0, activation=None, bias=False):
    rng = np.random.default_rng(seed)
    if case.make is None:
        kernel = case.format.packing(Geometry(experts, hidden, width)).format
        return reference.random_layer(kernel, experts, hidden, width, rng, activation=activation, bias=bias)
    layer = reference.random_layer("bf16", experts, hidden, width, rng, activation=activation, bias=bias)
    layer.weights = [{part: case.make(*matrix.values.shape, rng) for part, matrix in parts.items()} for parts in layer.weights]
    return layer


def tensors(layer, case) -> dict[tuple[int, str, str], torch.Tensor]:
    """Every checkpoint tensor of the layer by (expert, part, what), as this format's checkpoints hold it."""
    found = {}
    for expert, parts in enumerate(layer.weights):
        for part, matrix in parts.items():
            held = matrix.tensors if case.make else _tensors(matrix, case.format)
            found |= {(expert, part, what): tensor for what, tensor in held.items()}
            if layer.biases:
                found[expert, part, formats.BIAS] = torch.from_numpy(layer.biases[expert][part])
    return found


def _tensors(matrix, format) -> dict[str, torch.Tensor]:
    if isinstance(format, formats.Unquantized):
        return {formats.CODES: torch.from_numpy(matrix.codes.view(np.int16)).view(torch.bfloat16)}
    found = {formats.CODES: torch.from_numpy(matrix.codes), formats.SCALES: torch.from_numpy(matrix.scales)}
    if matrix.scales is not None and formats.GLOBAL in format.needs:
        found[formats.SCALES] = found[formats.SCALES].view(torch.float8_e4m3fn)
        divides = isinstance(format, formats.CompressedTensorsNvfp4)
        found[formats.GLOBAL] = torch.tensor(1 / matrix.global_scale if divides else matrix.global_scale)
    return found


def empty_store(layer, case, *, rank=0, ranks=1, bias=False, dtype=None) -> LayerStore:
    stored = {what: held for what, held in case.stored.items() if held}
    geometry = Geometry(len(layer.weights), layer.hidden, layer.width // ranks, rank, ranks, dtype or case.dtype, stored)
    act = layer.activation
    experts = kernels.Experts(
        kernels.engine(),
        packing=case.format.packing(geometry),
        experts=geometry.experts,
        hidden=geometry.hidden,
        width=geometry.width,
        activation=kernels.Activation(act.activation, act.alpha, act.limit, act.limit_after, act.up_bias),
        bias=bias,
    )
    return LayerStore(
        name=NAME, layer_id=3, format=case.format, experts=experts, geometry=geometry, bias=bias, progress=Progress()
    )


def loader(store, half: str, what: str, *, interleaved=False) -> ExpertLoader:
    """The loader of the parameter that holds this, under the name that the format gives it."""
    fields = store.format.fields(bias=formats.BIAS in store.needs)
    name = next(name for name, field in fields.items() if (field.half, field.what) == (half, what))
    return ExpertLoader(store, name, fields[name], interleaved=interleaved)


def load(store, loaded, *, only=None) -> LayerStore:
    """Hand over tensors one expert at a time, as most model code does."""
    for (expert, part, what), tensor in loaded.items():
        if only is None or only(expert, part, what):
            field_loader = loader(store, "w2" if part == "down" else "w13", what)
            field_loader(None, tensor, f"{NAME}.{part}", shard_id=SHARD[part], expert_id=expert)
    return store


def batch(layer, tokens: int, *, top_k=2, dtype=torch.bfloat16, seed=1):
    """Hidden states, ids and weights of some tokens; every token's experts differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, layer.hidden), generator=generator).to(dtype)
    experts = len(layer.weights)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]) if tokens else torch.empty((0, top_k))
    return x, ids.to(torch.int32), torch.rand((tokens, top_k), generator=generator)


def assert_equals_reference(out, layer, x, ids, weights, **options) -> None:
    step = 2.0**-8 if x.dtype is torch.bfloat16 else 2.0**-15
    expected, bound = layer.forward(x.double().numpy(), ids.numpy(), weights.double().numpy(), step=step, **options)
    rounding = 2.0**-8 if out.dtype is torch.bfloat16 else 2.0**-23
    error = np.abs(out.double().numpy() - expected)
    assert np.isfinite(error).all()
    assert (error <= bound + rounding * np.abs(expected)).all(), f"off by up to {error.max()}"
    assert np.abs(expected).max() > 0
