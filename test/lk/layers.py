"""Random layers in checkpoint form as torch tensors, stores filled with them, and the float64 answer.

The values come from the kernels' own reference; here they only change clothes. No model and nothing from upstream.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from sglang.srt.lk import formats, kernels
from sglang.srt.lk.loading import ExpertLoader
from sglang.srt.lk.store import Geometry, LayerStore, Progress

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


def random_layer(format, *, experts=4, hidden=64, width=96, seed=0, activation=None, bias=False):
    rng = np.random.default_rng(seed)
    return reference.random_layer(format.kernel, experts, hidden, width, rng, activation=activation, bias=bias)


def tensors(layer, format) -> dict[tuple[int, str, str], torch.Tensor]:
    """Every checkpoint tensor of the layer by (expert, part, what), as this format's checkpoints hold it."""
    found = {}
    for expert, parts in enumerate(layer.weights):
        for part, matrix in parts.items():
            found |= {(expert, part, what): tensor for what, tensor in _tensors(matrix, format).items()}
            if layer.biases:
                found[expert, part, formats.BIAS] = torch.from_numpy(layer.biases[expert][part])
    return found


def _tensors(matrix, format) -> dict[str, torch.Tensor]:
    if format.kernel == "bf16":
        return {formats.CODES: torch.from_numpy(matrix.codes.view(np.int16)).view(torch.bfloat16)}
    found = {formats.CODES: torch.from_numpy(matrix.codes), formats.SCALES: torch.from_numpy(matrix.scales)}
    if format.kernel == "nvfp4":
        found[formats.SCALES] = found[formats.SCALES].view(torch.float8_e4m3fn)
        divides = isinstance(format, formats.CompressedTensorsNvfp4)
        found[formats.GLOBAL] = torch.tensor(1 / matrix.global_scale if divides else matrix.global_scale)
    return found


def empty_store(layer, format, *, rank=0, ranks=1, bias=False) -> LayerStore:
    geometry = Geometry(len(layer.weights), layer.hidden, layer.width // ranks, rank, ranks)
    act = layer.activation
    experts = kernels.Experts(
        kernels.engine(),
        format=format.kernel,
        experts=geometry.experts,
        hidden=geometry.hidden,
        width=geometry.width,
        activation=kernels.Activation(act.activation, act.alpha, act.limit, act.limit_after, act.up_bias),
        bias=bias,
    )
    return LayerStore(
        name=NAME, layer_id=3, format=format, experts=experts, geometry=geometry, bias=bias, progress=Progress()
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
