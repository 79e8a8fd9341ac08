"""The packed layout as docs/reference/packed-layout.md gives it: its sizes are the extension's, its example is its rules.

``packed`` is the page as code, one byte at a time. A new format is a row of ``LAYOUTS`` and an example on the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import native
import numpy as np
import pytest
import reference
import sgl_kernel_ext as ext

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/packed-layout.md"
COLUMNS = 16

UNIT = 32


@dataclass(frozen=True)
class Row:
    """A row of the page's table, for one choice where there are several."""

    bits: int
    group: int = 0
    scale_bytes: int = 0  # of one element
    shared: bool = False
    zeros: bool = False
    native: dict = field(default_factory=dict)  # the extension's arguments for the choice

    def depth(self, k: int) -> int:
        return -(-k // UNIT) * UNIT

    def groups(self, k: int) -> int:
        return -(-self.depth(k) // self.group) if self.group else 0

    def codes(self, k: int) -> int:
        return self.depth(k) * COLUMNS * self.bits // 8

    def scales(self, k: int) -> int:
        return self.groups(k) * self.scale_bytes * (1 if self.shared else COLUMNS)

    def zero_points(self, k: int) -> int:
        return self.groups(k) * COLUMNS if self.zeros else 0

    def matrix(self, panels: int, k: int) -> int:
        return -(-panels * (self.codes(k) + self.scales(k) + self.zero_points(k)) // 64) * 64

    def expert(self, hidden: int, width: int) -> int:
        return self.matrix(2 * -(-width // COLUMNS), hidden) + self.matrix(-(-hidden // COLUMNS), width)


LAYOUTS = {
    "bf16": Row(16),
    "f16": Row(16),
    "fp8": Row(8, 128, 4, shared=True, native={"group": 128, "scales": "f32_shared"}),
    "mxfp8": Row(8, 32, 1),
    "mxfp4": Row(4, 32, 1),
    "nvfp4": Row(4, 16, 1),
    "int4": Row(4, 64, 2, zeros=True, native={"group": 64, "scales": "f16", "zeros": True}),
}


def place(row: Row, k: int) -> tuple[int, int]:
    """Offset of code ``k`` of column 0 in its panel, and its first bit in the byte there."""
    per_block = 64 * 8 // row.bits // COLUMNS
    block, inside = divmod(k, per_block)
    pair, parity = divmod(inside, 2)
    bit = pair * row.bits
    return block * 64 + parity * 2 + bit // 8, bit % 8


def packed(row: Row, codes: np.ndarray, scales: np.ndarray | None = None, zeros: np.ndarray | None = None) -> np.ndarray:
    """``codes[n, k]`` as numbers, ``scales[n, group]`` and ``zeros[n, group]`` as the bytes of one matrix of panels."""
    columns, depth = codes.shape
    panels = -(-columns // COLUMNS)
    out = np.zeros(row.matrix(panels, depth), np.uint8)
    if row.native.get("zeros"):
        out[: panels * row.codes(depth)] = 0x88
    for n in range(columns):
        panel, c = divmod(n, COLUMNS)
        for k in range(depth):
            at, bit = place(row, k)
            at += panel * row.codes(depth) + 4 * c
            if row.bits == 16:
                out[at : at + 2] = [codes[n, k] & 255, codes[n, k] >> 8]
            elif row.bits == 8:
                out[at] = codes[n, k]
            else:
                out[at] = out[at] & (0xF0 >> bit) | codes[n, k] << bit
        for g in range(scales.shape[1] if row.group else 0):  # padding keeps zeros
            at = panels * row.codes(depth) + panel * row.scales(depth)
            element = scales[n, g : g + 1].view(np.uint8)
            at += (g if row.shared else g * COLUMNS + c) * row.scale_bytes
            out[at : at + row.scale_bytes] = element
            if row.zeros:
                at = panels * (row.codes(depth) + row.scales(depth)) + panel * row.zero_points(depth) + g * COLUMNS + c
                out[at] = (8 - int(zeros[n, g])) % 256
    return out


def example(format: str, depth: int) -> np.ndarray:
    """The matrix that the page's example describes, packed."""
    row = LAYOUTS[format]
    n, k, g = np.arange(17)[:, None], np.arange(depth), np.arange(row.groups(depth))
    codes = 256 * n + k if row.bits == 16 else (16 * n + k) % 251 if row.bits == 8 else (n + k) % 16
    if not row.group:
        return packed(row, codes)
    if row.shared:
        return packed(row, codes, np.repeat(1.0 + g[None], 17, axis=0).astype(np.float32))
    scales = 16 * g + n
    if row.scale_bytes == 2:
        return packed(row, codes, (scales + 1).astype(np.float16), (n + g) % 16)
    return packed(row, codes, scales.astype(np.uint8))


def shown() -> list[tuple[str, int, int, list[tuple[int, list[int]]]]]:
    """Format, K, panel bytes and (offset, bytes) lines of every example on the page."""
    pattern = r"\*\*(\w+)\*\*, K = (\d+),.*?The matrix has (\d+) bytes\.\n\n```text\n(.*?)```"
    out = []
    for format, depth, size, text in re.findall(pattern, PAGE.read_text(), re.DOTALL):
        lines = [re.match(r" *(\d+): ((?:[0-9a-f]{2} )+)", line) for line in text.splitlines()]
        rows = [(int(line[1]), [int(byte, 16) for byte in line[2].split()]) for line in lines]
        out.append((format, int(depth), int(size), rows))
    return out


def test_the_page_has_an_example_and_a_row_of_sizes_for_every_format():
    assert [format for format, *_ in shown()] == ext.formats() == list(LAYOUTS)
    for format, row in LAYOUTS.items():
        assert re.search(rf"^\| `{format}` \| {row.bits} \|", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("format", ext.formats())
def test_the_example_follows_from_the_rules(format):
    (_, depth, size, rows) = next(each for each in shown() if each[0] == format)
    bytes_ = example(format, depth)
    assert len(bytes_) == size and rows
    for offset, values in rows:
        assert bytes_[offset : offset + 16].tolist() == values


@pytest.mark.parametrize("format", ext.formats())
@pytest.mark.parametrize("shape", [(2048, 768), (4096, 2048), (2880, 2880), (1, 1), (33, 17), (127, 129), (160, 320)], ids=str)
def test_the_sizes_are_the_extensions(format, shape):
    assert LAYOUTS[format].expert(*shape) == ext.packed_bytes(format, *shape, **LAYOUTS[format].native)


@pytest.mark.parametrize("coding", [name for name, c in reference.CODINGS.items() if LAYOUTS[c.format].native == c.native])
def test_what_is_packed_is_what_the_page_says(coding):
    """Byte for byte, of odd sizes: the store as ``packed_matrix`` shows it against the rules."""
    row, layer = LAYOUTS[reference.CODINGS[coding].format], reference.random_layer(coding, 2, 84, 39, np.random.default_rng(1))
    experts = native.build(layer)
    gate, up, down = (layer.weights[1][part] for part in ("gate", "up", "down"))
    raw = np.frombuffer(experts.packed(1), np.uint8)
    both = row.matrix(6, 84)
    one = [packed(row, *unpacked(row, m, 84)) for m in (gate, up)]
    parts = [row.codes(84), row.scales(84), row.zero_points(84)]
    at, single = 0, [0, 0]
    for size in parts:
        for panel in range(3):
            for which in range(2):
                expected = one[which][single[which] + panel * size : single[which] + (panel + 1) * size]
                assert (raw[at : at + size] == expected).all()
                at += size
        single = [s + 3 * size for s in single]
    assert at <= both and (raw[both:] == packed(row, *unpacked(row, down, 39))).all()


def unpacked(row: Row, m: reference.Matrix, columns: int):
    codes = reference.nibbles(m.codes)[:, :columns] if row.bits == 4 else m.codes
    return codes.astype(np.int64), m.scales, m.zeros
