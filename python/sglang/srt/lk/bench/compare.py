"""Two stored runs against each other, by share of the machine rather than by milliseconds.

A case got slower when its nearer limit's share fell by more than the tolerance: that survives a neighbour who
takes half of the memory's bandwidth in one of the runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

KEY = ("hidden", "width", "experts", "top_k", "format", "isa", "rows", "threads")
RATIOS = ("read_ratio", "dot_ratio")
MOST = 1e9  # more is no share of a machine, nor a number that can be divided


@dataclass(frozen=True)
class Change:
    key: tuple
    limit: str  # "read" or "dot": the limit that the case is nearer to in the first run
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


def load(path: Path) -> dict[tuple, dict]:
    """The rows by case; ``ValueError`` says which file is none of ours, and which row of it."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = {tuple(row[name] for name in KEY): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no result of `sglang-lk bench kernels --json` ({error!r})") from error
    for key, row in found.items():
        for name in RATIOS:
            if type(row.get(name)) not in (int, float) or not 0 < row[name] < MOST:
                case = " ".join(map(str, key))
                raise ValueError(f"{path}: {name} of the case {case} is {str(row.get(name))[:60]}, and must be a number above 0")
    return found


def compare(first: Path, second: Path) -> list[Change]:
    a, b = load(first), load(second)
    common = [key for key in a if key in b]
    if not common:
        raise ValueError(
            f"{first} and {second} have no case in common: run both with the same shapes, formats, rows and threads"
        )
    changes = []
    for key in common:
        limit = "read" if a[key]["read_ratio"] >= a[key]["dot_ratio"] else "dot"
        changes.append(Change(key, limit, a[key][f"{limit}_ratio"], b[key][f"{limit}_ratio"]))
    return changes
