"""Random experts, filled fast: one expert's bytes are drawn once and packed into every slot.

Speed does not depend on values, only on addresses, so equal experts measure like different ones; values stay
moderate so that no result overflows. A new format needs one entry in ``FILLS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang.srt.lk.bench.cases import Shape

PARTS = ("gate", "up", "down")
Codes = Callable[[np.random.Generator, int, int], np.ndarray]


def _bf16(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _nibbles(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)


def _e8m0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(119, 123, (rows, columns // 32), dtype=np.uint8)  # 2**-8 to 2**-5


def _e4m3(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(0x30, 0x41, (rows, columns // 16), dtype=np.uint8)  # 0.5 to 2


@dataclass(frozen=True)
class Fill:
    codes: Codes
    bits: float  # of one weight in the checkpoint, its share of the group scale included
    scales: Codes | None = None
    global_scale: float | None = None
    multiple: int = 1  # hidden and width must be divisible by it


FILLS = {
    "bf16": Fill(_bf16, 16),
    "mxfp4": Fill(_nibbles, 4 + 8 / 32, _e8m0, multiple=32),
    "nvfp4": Fill(_nibbles, 4 + 8 / 16, _e4m3, global_scale=1 / 64, multiple=16),
}


def check(fmt: str, shape: Shape) -> None:
    if fmt not in FILLS:
        raise ValueError(f"--format {fmt}: no random experts are defined for it; known are {', '.join(FILLS)}")
    if shape.hidden % FILLS[fmt].multiple or shape.width % FILLS[fmt].multiple:
        raise ValueError(f"--shape {shape}: {fmt} needs HIDDEN and WIDTH divisible by {FILLS[fmt].multiple}")


def expert_bytes(fmt: str, shape: Shape) -> float:
    """Bytes of one expert as a checkpoint stores it."""
    return shape.weights * FILLS[fmt].bits / 8


def make_layer(ext, engine, fmt: str, shape: Shape, seed: int = 0):
    """One packed layer, an ``Experts`` of the extension ``ext``."""
    fill, rng = FILLS[fmt], np.random.default_rng(seed)
    layer = ext.Experts(engine, fmt, shape.experts, shape.hidden, shape.width)
    for part in PARTS:
        rows, columns = (shape.hidden, shape.width) if part == "down" else (shape.width, shape.hidden)
        codes = fill.codes(rng, rows, columns)
        scales = fill.scales(rng, rows, columns) if fill.scales else None
        for expert in range(shape.experts):
            bad = layer.pack_codes(expert, part, codes.ctypes.data, codes.strides[0])
            if scales is not None:
                bad += layer.pack_scales(expert, part, scales.ctypes.data, scales.strides[0])
            if fill.global_scale is not None:
                layer.set_global_scale(expert, part, fill.global_scale)
            if bad:
                raise RuntimeError(f"{fmt}: the extension refused {bad} random values of {part}; they are meant to be valid")
    return layer
