"""The packed layout as docs/reference/packed-layout.md gives it: its sizes are the extension's, its example is its rules.

``packed`` is the page as code, one byte at a time. A new format is a row of ``LAYOUTS`` and an example on the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import sgl_kernel_ext as ext

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/packed-layout.md"
COLUMNS = 16

# format: k in a super-group, code bytes, group (0: no scales)
LAYOUTS = {"bf16": (32, 1024, 0), "mxfp4": (128, 1024, 32), "nvfp4": (64, 512, 16)}


def super_bytes(format: str) -> int:
    k, codes, group = LAYOUTS[format]
    return codes + (k // group * COLUMNS if group else 0)


def panel_bytes(format: str, depth: int) -> int:
    return -(-depth // LAYOUTS[format][0]) * super_bytes(format)


def expert_bytes(format: str, hidden: int, width: int) -> int:
    return 2 * -(-width // COLUMNS) * panel_bytes(format, hidden) + -(-hidden // COLUMNS) * panel_bytes(format, width)


def packed(format: str, codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """``codes[n, k]`` (bf16 patterns or 4-bit codes) and ``scales[n, group]`` as the bytes of all panels."""
    (columns, depth), (per_super, code_bytes, group) = codes.shape, LAYOUTS[format]
    size = panel_bytes(format, depth)
    out = np.zeros(-(-columns // COLUMNS) * size, np.uint8)
    for n in range(columns):
        panel, c = divmod(n, COLUMNS)
        for k in range(depth):
            s, inside = divmod(k, per_super)
            at = panel * size + s * super_bytes(format) + 4 * c
            if format == "bf16":
                at += inside // 2 * 64 + inside % 2 * 2
                out[at : at + 2] = [codes[n, k] & 255, codes[n, k] >> 8]
            else:
                block, j = divmod(inside, 8)
                at += block * 64 + j % 2 * 2 + j // 4
                out[at] |= codes[n, k] << (j // 2 % 2 * 4)
        for g in range(scales.shape[1] if group else 0):
            s, inside = divmod(g, per_super // group)
            out[panel * size + s * super_bytes(format) + code_bytes + inside * COLUMNS + c] = scales[n, g]
    return out


def example(format: str, depth: int) -> np.ndarray:
    """The matrix that the page's example describes, packed."""
    n, k = np.arange(17)[:, None], np.arange(depth)
    if format == "bf16":
        return packed(format, 256 * n + k, None)
    groups = np.arange(depth // LAYOUTS[format][2])
    return packed(format, (n + k) % 16, 16 * groups + n)


def shown() -> list[tuple[str, int, int, list[tuple[int, list[int]]]]]:
    """Format, K, panel bytes and (offset, bytes) lines of every example on the page."""
    pattern = r"\*\*(\w+)\*\*, K = (\d+),.*?Panels are (\d+) bytes\.\n\n```text\n(.*?)```"
    out = []
    for format, depth, size, text in re.findall(pattern, PAGE.read_text(), re.DOTALL):
        lines = [re.match(r" *(\d+): ((?:[0-9a-f]{2} )+)", line) for line in text.splitlines()]
        rows = [(int(line[1]), [int(byte, 16) for byte in line[2].split()]) for line in lines]
        out.append((format, int(depth), int(size), rows))
    return out


def test_the_page_has_an_example_and_a_row_of_sizes_for_every_format():
    assert [format for format, *_ in shown()] == ext.formats() == list(LAYOUTS)
    for format, (k, codes, group) in LAYOUTS.items():
        scale = f"{k // group} × 16" if group else "0"
        row = f"| `{format}` | {k} | {codes} | {group or '–'} | {scale} | {super_bytes(format)} |"
        assert row in PAGE.read_text()


@pytest.mark.parametrize("format", ext.formats())
def test_the_example_follows_from_the_rules(format):
    (_, depth, size, rows) = next(each for each in shown() if each[0] == format)
    assert panel_bytes(format, depth) == size
    bytes_ = example(format, depth)
    for offset, values in rows:
        assert bytes_[offset : offset + 16].tolist() == values


@pytest.mark.parametrize("format", ext.formats())
@pytest.mark.parametrize("shape", [(2048, 768), (4096, 2048), (2880, 2880), (1, 1), (33, 17), (127, 129), (160, 320)], ids=str)
def test_the_sizes_are_the_extensions(format, shape):
    assert expert_bytes(format, *shape) == ext.packed_bytes(format, *shape)
