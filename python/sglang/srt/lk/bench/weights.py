"""Random experts, filled fast: one expert's bytes are drawn once and packed into every slot.

Speed does not depend on values, only on addresses, so equal experts measure like different ones; values stay
moderate so that no result overflows. A new format needs one entry in ``FILLS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.lk.bench.cases import Shape

PARTS = ("gate", "up", "down")
Codes = Callable[[np.random.Generator, int, int], np.ndarray]


def _bf16(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _f16(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)).astype(np.float16)


def _fp8(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, columns), dtype=np.uint8) & 0xBF  # below 2: no NaN


def _nibbles(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, -(-columns // 2)), dtype=np.uint8)


def _e8m0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(119, 123, (rows, -(-columns // 32)), dtype=np.uint8)  # 2**-8 to 2**-5


def _e4m3(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(0x30, 0x41, (rows, -(-columns // 16)), dtype=np.uint8)  # 0.5 to 2


def _blocks(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    scales = rng.uniform(0.01, 0.02, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    return np.repeat(scales, 128, axis=0)[:rows].copy()


def _half_scales(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.uniform(0.005, 0.01, (rows, -(-columns // 128))).astype(np.float16)


def _zeros(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(6, 11, (rows, -(-columns // 128)), dtype=np.uint8)


@dataclass(frozen=True)
class Fill:
    """``coding``: what the layer is made with, as the extension's ``Experts`` names it."""

    codes: Codes
    bits: float  # of one weight in the checkpoint, its share of the group scale included
    scales: Codes | None = None
    global_scale: float | None = None
    zeros: Codes | None = None
    coding: Mapping[str, object] = field(default_factory=dict)


def _int4(bits: float, zeros: Codes | None) -> Fill:
    coding = {"format": "int4", "group": 128, "scales": "f16", "zeros": zeros is not None}
    return Fill(_nibbles, bits, _half_scales, zeros=zeros, coding=coding)


FILLS = {
    "bf16": Fill(_bf16, 16),
    "f16": Fill(_f16, 16),
    "fp8": Fill(_fp8, 8, global_scale=1 / 32),
    "fp8_block": Fill(_fp8, 8 + 32 / 128**2, _blocks, coding={"format": "fp8", "group": 128, "scales": "f32_shared"}),
    "mxfp8": Fill(_fp8, 8 + 8 / 32, _e8m0),
    "mxfp4": Fill(_nibbles, 4 + 8 / 32, _e8m0),
    "nvfp4": Fill(_nibbles, 4 + 8 / 16, _e4m3, global_scale=1 / 64),
    "int4": _int4(4 + 16 / 128, None),
    "int4_zeros": _int4(4 + 20 / 128, _zeros),
}


def expert_bytes(fmt: str, shape: Shape) -> float:
    """Bytes of one expert as a checkpoint stores it."""
    return shape.weights * FILLS[fmt].bits / 8


def packed_bytes(ext, fmt: str, shape: Shape) -> int:
    """Bytes of one expert in the store."""
    return ext.packed_bytes(hidden=shape.hidden, width=shape.width, **{"format": fmt, **FILLS[fmt].coding})


def make_layer(ext, engine, fmt: str, shape: Shape, seed: int = 0):
    """One packed layer, an ``Experts`` of the extension ``ext``."""
    fill, rng = FILLS[fmt], np.random.default_rng(seed)
    made = {"format": fmt, **fill.coding}
    layer = ext.Experts(engine, experts=shape.experts, hidden=shape.hidden, width=shape.width, **made)
    for part in PARTS:
        rows, columns = (shape.hidden, shape.width) if part == "down" else (shape.width, shape.hidden)
        draws = ((layer.pack_codes, fill.codes), (layer.pack_scales, fill.scales), (layer.pack_zeros, fill.zeros))
        drawn = [(pack, draw(rng, rows, columns)) for pack, draw in draws if draw]
        for expert in range(shape.experts):
            bad = sum(pack(expert, part, values.ctypes.data, values.strides[0]) for pack, values in drawn)
            if fill.global_scale is not None:
                layer.set_global_scale(expert, part, fill.global_scale)
            if bad:
                raise RuntimeError(f"{fmt}: the extension refused {bad} random values of {part}; they are meant to be valid")
    return layer
