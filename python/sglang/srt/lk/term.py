"""How facts look in a terminal or a log: columns, colours, sizes, runs of numbers.

Knows nothing of what it shows, and imports nothing heavy. Colour appears only on a terminal and never when NO_COLOR is set.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

GIB = 1 << 30
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Style:
    """Paints words, or leaves them alone: ``Style(colour=False)("red", "no")`` is ``"no"``."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        return cls(stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def __call__(self, name: str, text: str) -> str:
        return f"\x1b[{_CODES[name]}m{text}\x1b[0m" if self.colour and text else text


def table(rows: list[list[str]], align: str, gap: str = "  ") -> list[str]:
    """Lines of equal columns; ``align`` has one of ``<`` and ``>`` per column. Colours do not count as width."""
    widths = [max(width(row[i]) for row in rows) for i in range(len(align))]
    return [gap.join(pad(cell, w, side) for cell, w, side in zip(row, widths, align)).rstrip() for row in rows]


def pad(text: str, columns: int, side: str = "<") -> str:
    fill = " " * max(0, columns - width(text))
    return text + fill if side == "<" else fill + text


def width(text: str) -> int:
    return len(_ESCAPE.sub("", text))


def gib(count: float) -> str:
    """Bytes as people read them: ``23.5 GiB``, ``512 MiB``, ``3 KiB``."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / 1024:.0f} KiB"


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``, the form that taskset and LK_GPU_RESIDENT_MOE_LAYERS use; empty if there are none."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def write(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()
