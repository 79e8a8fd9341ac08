"""The native layer driven with numpy buffers: builds it from a reference layer and runs it into poisoned outputs."""

from __future__ import annotations

import contextlib
from functools import lru_cache

import numpy as np
import sgl_kernel_ext as ext

import reference

ISAS = [row["name"] for row in ext.isas() if row["supported"]]
LANES = [row["name"] for row in ext.isas() if row["supported"] and row["lane"]]
X_TYPES = {np.uint16: "bf16", np.float16: "f16", np.float32: "f32"}
CODINGS = list(reference.CODINGS)


@lru_cache(maxsize=None)
def engine(isa: str = "", threads: int = 2, nodes: tuple[int, ...] = (), batch_invariant: bool = False):
    """One engine per combination of arguments; more threads than cores share them."""
    import os

    cpus = sorted(os.sched_getaffinity(0))
    spin = 200 if threads <= len(cpus) else 0  # awake workers would keep the others from a core
    made = ext.Engine([cpus[i % len(cpus)] for i in range(threads)], isa, spin_us=spin, nodes=list(nodes), batch_invariant=batch_invariant)
    assert not isa or made.isa == isa, "the forced instruction set is not the one that runs"
    return made


def build(layer: reference.Layer, isa: str = "", threads: int = 2, made: ext.Engine | None = None):
    """Packs a reference layer, for an engine already ``made`` or one of the cached."""
    a, c = layer.activation, layer.coding
    experts = ext.Experts(
        made or engine(isa, threads), c.format, len(layer.weights), layer.hidden, layer.width, a.activation,
        a.alpha, a.limit, a.limit_after, a.up_bias, layer.biases is not None, c.group, c.scales, c.zeros, c.column_scales,
    )  # fmt: skip
    for e, parts in enumerate(layer.weights):
        for part, m in parts.items():
            pack(experts, e, part, m)
            if layer.biases:
                experts.set_bias(e, part, layer.biases[e][part].ctypes.data)
    return experts


def pack(experts, expert: int, part: str, m: reference.Matrix) -> None:
    """One matrix, every part of it."""
    address = lambda array: (array.ctypes.data, array.strides[0])
    assert experts.pack_codes(expert, part, *address(m.codes)) == 0
    if m.scales is not None:
        assert experts.pack_scales(expert, part, *address(m.scales)) == 0
    if m.zeros is not None:
        assert experts.pack_zeros(expert, part, *address(m.zeros)) == 0
    if m.columns is not None:
        experts.set_column_scales(expert, part, m.columns.ctypes.data)
    experts.set_global_scale(expert, part, m.global_scale)


def run(experts, x, ids, weights, scale=1.0, weight_on_input=False, out_dtype="f32") -> np.ndarray:
    """Forward pass of ``x`` [T, H] (any strides): bf16 patterns, float16 or float32; the output starts as NaN."""
    assert weights.dtype == np.float32 and ids.dtype in (np.int32, np.int64)
    if out_dtype in ("f32", "f16"):
        out = np.full((len(x), experts.hidden), np.nan, np.float32 if out_dtype == "f32" else np.float16)
    else:
        out = np.full((len(x), experts.hidden), 0x7FC1, np.uint16)
    experts.forward(
        x.ctypes.data, x.strides[0], X_TYPES[x.dtype.type], len(x),
        ids.ctypes.data, ids.strides[0], "i32" if ids.dtype == np.int32 else "i64",
        weights.ctypes.data, weights.strides[0], ids.shape[1],
        out.ctypes.data, out.strides[0], out_dtype, scale, weight_on_input,
    )  # fmt: skip
    return out


def assert_bits_equal(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape and a.size and not np.isnan(a.astype(np.float64)).any()
    assert (a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")).all()


def assert_within(out: np.ndarray, truth: np.ndarray, bound: np.ndarray) -> None:
    """|out - truth| <= bound everywhere; NaN never passes."""
    assert out.shape == truth.shape and out.size
    error = np.abs(out.astype(np.float64) - truth)
    worst = np.nanargmax(error / bound) if not np.isnan(error).all() else 0
    assert (error <= bound).all(), f"off by {error.flat[worst]:.3g} at {worst}, allowed {bound.flat[worst]:.3g}"


def sleeps_of_worker(task: str) -> int:
    """How often a thread has gone to sleep by itself; 0 for other threads, and for one that has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = dict(line.split(":\t", 1) for line in open(f"/proc/self/task/{task}/status") if ":\t" in line)
        return int(lines["voluntary_ctxt_switches"]) if lines["Name"] == "lk-worker\n" else 0
    return 0
