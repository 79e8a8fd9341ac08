"""How measured rows are shown, and what is stored beside them.

Figures come from ``kernels``; nothing is computed here but rounding.
"""

from __future__ import annotations

import time

from sglang.srt.lk import cpus, machine
from sglang.srt.lk.bench import kernels
from sglang.srt.lk.bench.kernels import Plan, Row
from sglang.srt.lk.term import Style, gib, pad, ranges

_COLUMNS = (  # heading, width, side
    ("hidden,width,experts,k", 22, "<"),
    ("format", 10, "<"),
    ("isa", 11, "<"),
    ("rows", 5, ">"),
    ("ms", 9, ">"),
    ("GB/s", 6, ">"),
    ("of read", 7, ">"),
    ("GF/s", 6, ">"),
    ("of dot", 6, ">"),
    ("spread", 6, ">"),
)

LEGEND = "ms: median call; of read: share of a plain reader just before and after; of dot: share of the dot-product peak"


def facts(ext, plan: Plan) -> dict:
    """The machine and the method, as stored beside the rows."""
    return {
        **machine.system(),
        "cpu": ext.cpu()["brand"],
        "cpus": plan.cpus,
        "numa_nodes": plan.nodes,
        "numa_split": plan.placement.get("place", False),
        "l3_bytes": machine.l3_bytes(plan.cpus),
        "memory_bytes": cpus.memory().total,
        "thp": machine.huge_pages(probe=False).mode,
        "huge": plan.huge,
        "call_us": round(kernels.call_us(ext, plan), 2),
        "busy": machine.busy(plan.cpus),
        "kernels_abi": ext.ABI,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": plan.seconds,
        "repeats": plan.repeats,
    }


def opening(found: dict, style: Style) -> list[str]:
    machine_facts = (
        style("bold", found["cpu"]),
        f"{len(found['cpus'])} threads on CPUs {ranges(found['cpus'])}",
        f"L3 {gib(found['l3_bytes'] or 0)}",
        f"2 MB pages {'on' if found['huge'] and found['thp'] != 'never' else 'off'}",
        f"an empty call {found['call_us']:.1f} µs",
    )
    lines = [" · ".join(machine_facts), style("dim", LEGEND)]
    if (found["busy"] or 0) > 0.1:
        lines.append(style("yellow", f"Others take {found['busy']:.0%} of these CPUs: do not rely on the figures."))
    return lines


def heading(style: Style) -> str:
    return style("dim", "  ".join(pad(name, size, side) for name, size, side in _COLUMNS))


def line(row: Row, style: Style) -> str:
    bound = "read" if row.read_ratio >= row.dot_ratio else "dot"  # the limit that this case is nearer to
    cells = (
        f"{row.hidden},{row.width},{row.experts},{row.top_k}",
        row.format,
        row.isa,
        str(row.rows),
        f"{row.seconds * 1e3:.3f}",
        f"{row.gb_per_s:.1f}",
        _share(row.read_ratio, bound == "read", style),
        f"{row.gflop_per_s:.0f}",
        _share(row.dot_ratio, bound == "dot", style),
        f"{row.spread:.0%}",
    )
    return "  ".join(pad(cell, size, side) for cell, (_, size, side) in zip(cells, _COLUMNS))


def _share(ratio: float, near: bool, style: Style) -> str:
    return style("bold", f"{ratio:.0%}") if near else style("dim", f"{ratio:.0%}")
