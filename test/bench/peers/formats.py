"""Random matrices in the bytes of every format, with their exact values; and the float64 truth of an expert call.

Everything is drawn from normal weights and rounded to the format as a plain quantiser would. Nothing is fast: for a
large matrix 128 rows are quantised and repeated, since speed does not depend on values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PARTS = ("gate", "up", "down")
SLAB = 128  # rows that are quantised; a multiple of every block height
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GGML = {"q8_0": 8, "q4_0": 2, "q4_K": 12, "mxfp4_ggml": 39, "nvfp4_ggml": 40}  # ggml's numbers of these types


@dataclass
class Matrix:
    """One matrix ``[rows, columns]``: its ``codes`` and ``scales`` as stored, and ``values`` (float32, exact) of all rows
    where they are needed for the truth. ``zeros``: what is subtracted from a code, per group, uint8."""

    codes: np.ndarray
    scales: np.ndarray | None = None
    values: np.ndarray | None = None
    zeros: np.ndarray | None = None
    global_scale: float = 1.0
    group: int = 0


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Finite values -> uint16 bf16 patterns, round to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_values() -> np.ndarray:
    """The 127 finite values from 0 to 448, by code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


E4M3 = e4m3_values()


def nearest(table: np.ndarray, values: np.ndarray, sign_bit: int) -> np.ndarray:
    """uint8 codes: the index of the nearest value of an ascending table, and the sign."""
    index = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values)).astype(np.uint8)
    return index | np.where(values < 0, sign_bit, 0).astype(np.uint8)


def decode(table: np.ndarray, codes: np.ndarray, sign_bit: int) -> np.ndarray:
    return np.where(codes & sign_bit, -1.0, 1.0) * table[codes & (sign_bit - 1)]


def groups(values: np.ndarray, group: int) -> np.ndarray:
    return values.reshape(len(values), -1, group)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even one in the low nibble."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def bf16(w: np.ndarray) -> Matrix:
    codes = to_bf16(w)
    return Matrix(codes, values=from_bf16(codes))


def f16(w: np.ndarray) -> Matrix:
    codes = w.astype(np.float16)
    return Matrix(codes.view(np.uint16), values=codes.astype(np.float32))


def fp8_block(w: np.ndarray) -> Matrix:
    """Scales: float32 ``[rows / 128, columns / 128]``, rounded up."""
    rows, columns = w.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), np.float32)
    padded[:rows, :columns] = w
    blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
    scales = (np.abs(blocks).max(axis=(1, 3)) / 448).astype(np.float32)
    wide = scales.repeat(128, axis=0).repeat(128, axis=1)[:rows, :columns]
    codes = nearest(E4M3, w / wide, 0x80)
    return Matrix(codes, scales, (decode(E4M3, codes, 0x80) * wide).astype(np.float32), group=128)


def fp8_channel(w: np.ndarray) -> Matrix:
    scales = (np.abs(w).max(axis=1) / 448).astype(np.float32)
    codes = nearest(E4M3, w / scales[:, None], 0x80)
    return Matrix(codes, scales, (decode(E4M3, codes, 0x80) * scales[:, None]).astype(np.float32))


def mx(w: np.ndarray, table: np.ndarray, sign_bit: int) -> Matrix:
    """Codes of a power-of-two scale per 32; scales uint8 (e8m0) ``[rows, columns / 32]``."""
    parts = groups(w, 32)
    exponent = np.ceil(np.log2(np.abs(parts).max(axis=2) / table[-1]))
    codes = nearest(table, parts / 2.0 ** exponent[:, :, None], sign_bit)
    values = decode(table, codes, sign_bit) * 2.0 ** exponent[:, :, None]
    return Matrix(
        codes.reshape(w.shape), (exponent + 127).astype(np.uint8), values.reshape(w.shape).astype(np.float32), group=32
    )


def mxfp8(w: np.ndarray) -> Matrix:
    return mx(w, E4M3, 0x80)


def mxfp4(w: np.ndarray) -> Matrix:
    matrix = mx(w, E2M1, 8)
    matrix.codes = pack_nibbles(matrix.codes)
    return matrix


def nvfp4(w: np.ndarray) -> Matrix:
    """Scales: uint8 (e4m3) per 16 and one float32 for all, a power of two so that bf16 holds their product exactly."""
    parts = groups(w, 16)
    wanted = np.abs(parts).max(axis=2) / 6
    second = 2.0 ** np.ceil(np.log2(wanted.max() / 448))
    scale_codes = np.maximum(nearest(E4M3, wanted / second, 0x80), 1)
    scales = E4M3[scale_codes] * second
    codes = nearest(E2M1, parts / scales[:, :, None], 8)
    values = decode(E2M1, codes, 8) * scales[:, :, None]
    return Matrix(
        pack_nibbles(codes.reshape(w.shape)),
        scale_codes,
        values.reshape(w.shape).astype(np.float32),
        global_scale=second,
        group=16,
    )


def int4(w: np.ndarray, group: int, scale_of: Callable[[np.ndarray], np.ndarray], with_zeros: bool = False) -> Matrix:
    """Codes 0..15 of ``value = (code - zero) * scale``, unpacked; the zero is 8 unless ``with_zeros``.

    ``scale_of`` rounds float scales to the stored width and gives them back as float32.
    """
    parts = groups(w, group)
    low, high = np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)
    scales = scale_of((high - low) / 15 if with_zeros else np.maximum(high, -low) / 7.5)
    zeros = np.clip(np.rint(-low / scales), 0, 15) if with_zeros else np.full(scales.shape, 8.0)
    codes = np.clip(np.rint(parts / scales[:, :, None]) + zeros[:, :, None], 0, 15).astype(np.uint8)
    values = ((codes - zeros[:, :, None]) * scales[:, :, None]).reshape(w.shape).astype(np.float32)
    return Matrix(codes.reshape(w.shape), scales, values, zeros.astype(np.uint8) if with_zeros else None, group=group)


def int4_g32(w: np.ndarray) -> Matrix:
    """As compressed-tensors packs it: two codes a byte, bf16 scales per 32."""
    matrix = int4(w, 32, lambda s: from_bf16(to_bf16(s)))
    matrix.codes, matrix.scales = pack_nibbles(matrix.codes), to_bf16(matrix.scales)
    return matrix


def widest_group(columns: int) -> int:
    return 128 if columns % 128 == 0 else 64


def int4_zeros(w: np.ndarray) -> Matrix:
    """Zero points and f16 scales per 128 (64 where that does not divide), as AWQ and GPTQ have them, rows of codes."""
    matrix = int4(w, widest_group(w.shape[1]), lambda s: s.astype(np.float16).astype(np.float32), with_zeros=True)
    matrix.codes, matrix.scales = pack_nibbles(matrix.codes), matrix.scales.astype(np.float16).view(np.uint16)
    return matrix


def int4_gptq(w: np.ndarray) -> Matrix:
    """As a symmetric GPTQ checkpoint has it: int32 of 8 codes ``[columns / 8, rows]``, f32 scales ``[groups, rows]``."""
    matrix = int4(w, widest_group(w.shape[1]), lambda s: s.astype(np.float16).astype(np.float32))
    eight = matrix.codes.reshape(len(w), -1, 8).astype(np.uint32)
    words = (eight << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    matrix.codes, matrix.scales = np.ascontiguousarray(words.T), np.ascontiguousarray(matrix.scales.T)
    return matrix


MAKERS: dict[str, Callable[[np.ndarray], Matrix]] = {
    name: maker
    for name, maker in globals().items()
    if name in ("bf16", "f16", "fp8_block", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int4_g32", "int4_zeros", "int4_gptq")
}


def random_matrix(fmt: str, rows: int, columns: int, rng: np.random.Generator, ggml=None, whole: bool = True) -> Matrix:
    """A random matrix of about unit gain. ``ggml`` quantises the formats of ``GGML``.

    Not ``whole``: the bytes of 128 rows, repeated, and no values.
    """
    some = rows if whole else min(rows, SLAB)
    w = rng.standard_normal((some, columns), dtype=np.float32) * np.float32(columns**-0.5)
    matrix = ggml.quantise(GGML[fmt], w) if fmt in GGML else MAKERS[fmt](w)
    return matrix if some == rows else _repeated(matrix, fmt, rows)


def _repeated(matrix: Matrix, fmt: str, rows: int) -> Matrix:
    def along(array: np.ndarray | None, axis: int, wanted: int) -> np.ndarray | None:
        if array is None:
            return None
        return np.ascontiguousarray(array.take(np.arange(wanted) % array.shape[axis], axis=axis))

    axis = 1 if fmt == "int4_gptq" else 0
    scale_rows = -(-rows // 128) if fmt == "fp8_block" else rows
    return Matrix(
        along(matrix.codes, axis, rows),
        along(matrix.scales, axis, scale_rows),
        None,
        along(matrix.zeros, axis, rows),
        matrix.global_scale,
        matrix.group,
    )


Expert = dict[str, Matrix]


def random_experts(fmt: str, shape, count: int, seed: int, ggml=None, whole: bool = True) -> list[Expert]:
    """``count`` different experts of a layer."""
    rng = np.random.default_rng(seed)
    sizes = {"gate": (shape.width, shape.hidden), "up": (shape.width, shape.hidden), "down": (shape.hidden, shape.width)}
    return [{part: random_matrix(fmt, *sizes[part], rng, ggml, whole) for part in PARTS} for _ in range(count)]


def truth(experts: list[Expert], x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """float64 output ``[tokens, hidden]`` of SwiGLU experts; ``x`` float, ``ids`` and ``weights`` ``[tokens, top_k]``."""
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(ids[t], weights[t]):
            m = {part: experts[expert][part].values.astype(np.float64) for part in PARTS}
            gate = m["gate"] @ row
            out[t] += weight * (m["down"] @ (gate / (1 + np.exp(-gate)) * (m["up"] @ row)))
    return out


def relative_error(out: np.ndarray, exact: np.ndarray) -> float:
    """Euclidean norm of the difference over that of the truth; NaN and infinities count as infinitely wrong."""
    error = np.linalg.norm(out.astype(np.float64) - exact) / np.linalg.norm(exact)
    return float(error) if np.isfinite(error) else float("inf")
