"""Random matrices as FP8 and INT4 checkpoints write them: the tensors, and their values in float64 by the definition.

The slow truth for ``sglang.srt.lk.formats``, of which nothing is used here but the names of what a tensor holds. Values are
made element by element out of codes, scales and zero points; tensors are packed by the letter of each format.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang.srt.lk.formats import CHANNEL, CODES, GLOBAL, ORDER, SCALES, ZEROS

AWQ_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours the nibbles of an AWQ word hold, lowest first


@dataclass
class Matrix:
    """``tensors`` by what they hold, and the ``[rows, columns]`` values that they mean."""

    values: np.ndarray
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    global_scale: float = 1.0


def half(rows: int, columns: int, rng, dtype: torch.dtype = torch.float16) -> Matrix:
    codes = torch.from_numpy(rng.standard_normal((rows, columns)) * columns**-0.5).to(dtype)
    return Matrix(codes.double().numpy(), {CODES: codes})


def fp8_block(rows: int, columns: int, rng, blocks: tuple[int, int], dtype: torch.dtype = torch.float32) -> Matrix:
    codes, values = _e4m3(rows, columns, rng)
    high, wide = blocks
    scales = _scales((math.ceil(rows / high), math.ceil(columns / wide)), columns, rng, dtype)
    for r in range(rows):
        for c in range(columns):
            values[r, c] *= float(scales[r // high, c // wide])
    return Matrix(values, {CODES: codes, SCALES: scales})


def fp8_tensor(rows: int, columns: int, rng) -> Matrix:
    codes, values = _e4m3(rows, columns, rng)
    scale = _scales((), columns, rng, torch.float32)
    return Matrix(values * float(scale), {CODES: codes, GLOBAL: scale})


def fp8_channel(rows: int, columns: int, rng, dtype: torch.dtype = torch.float32) -> Matrix:
    codes, values = _e4m3(rows, columns, rng)
    scales = _scales((rows, 1), columns, rng, dtype)
    return Matrix(values * scales.double().numpy(), {CODES: codes, CHANNEL: scales})


def mxfp8(rows: int, columns: int, rng) -> Matrix:
    codes, values = _e4m3(rows, columns, rng)
    exponents = rng.integers(112, 120, (rows, columns // 32), dtype=np.uint8)
    factors = 2.0 ** (exponents.astype(np.float64) - 127)
    return Matrix(values * np.repeat(factors, 32, axis=1), {CODES: codes, SCALES: torch.from_numpy(exponents)})


def int4(rows: int, columns: int, rng, kind: str, group: int, *, zeros: bool, dtype: torch.dtype = torch.float16, more: int = 1) -> Matrix:
    """``kind``: "awq", "gptq" or "compressed"; ``group`` -1: one scale per row; ``more``: what GPTQ leaves out of zero points."""
    group = columns if group == -1 else group
    codes = rng.integers(0, 16, (rows, columns))
    points = rng.integers(1, 16, (rows, columns // group)) if zeros else np.full((rows, columns // group), 8)
    scales = _scales((rows, columns // group), columns, rng, dtype) * 100
    values = np.empty((rows, columns))
    for c in range(columns):
        values[:, c] = (codes[:, c] - points[:, c // group]) * scales[:, c // group].double().numpy()
    held = SCALES if zeros or group != columns else CHANNEL
    order = torch.arange(columns, dtype=torch.int32) // group
    if kind == "awq":
        tensors = {CODES: _words(codes.T, AWQ_COLUMN), ZEROS: _words(points.T, AWQ_COLUMN), held: scales.T.contiguous()}
    elif kind == "gptq":
        tensors = {CODES: _words(codes, range(8)).T.contiguous(), ZEROS: _words(points.T - more, range(8))}
        tensors |= {held: scales.T.contiguous(), ORDER: order}
    else:
        tensors = {CODES: _words(codes, range(8)), ZEROS: _words(points.T, range(8)).T.contiguous(), held: scales}
    if not zeros:
        del tensors[ZEROS]
    return Matrix(values, tensors)


def _e4m3(rows: int, columns: int, rng) -> tuple[torch.Tensor, np.ndarray]:
    """Every finite code, subnormals and both zeros among them."""
    bits = rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8) | (rng.integers(0, 2, (rows, columns), dtype=np.uint8) << 7)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).astype(np.float64)
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7))
    return torch.from_numpy(bits).view(torch.float8_e4m3fn), np.where(bits & 0x80, -values, values)


def _scales(shape: tuple[int, ...], columns: int, rng, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.asarray(rng.uniform(0.2, 2.0, shape) * columns**-0.5 / 100)).to(dtype)


def _words(values: np.ndarray, places) -> torch.Tensor:
    """int32 words of eight neighbouring 4-bit values: nibble n holds neighbour ``places[n]``."""
    rows, columns = values.shape
    words = np.zeros((rows, columns // 8), np.uint32)
    for r in range(rows):
        for w in range(columns // 8):
            for nibble, place in enumerate(places):
                words[r, w] |= np.uint32(values[r, 8 * w + place]) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))
