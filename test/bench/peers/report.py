"""The result of a run: stored as JSON, and as tables for a page.

Nothing is measured here; the tables come from the file alone.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

FEW = 8  # up to so many tokens a case is shown as GB/s and share of the reader, beyond as GFLOP/s and share of the peak
RATES = {"read": ("gb_per_s", "read_ratio", "GB/s"), "dot": ("gflop_per_s", "dot_ratio", "GF/s")}


def store(path: Path, machine: dict, rows: list[dict]) -> None:
    """Written anew as the run goes on, so that an interrupted run keeps what it has."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    part.rename(path)


def load(path: Path) -> dict:
    stored = json.loads(path.read_text())
    if not isinstance(stored, dict) or {"machine", "rows"} - stored.keys():
        raise ValueError(f"{path} is no result of `peers run --json`")
    return stored


def figure(row: dict) -> str:
    """One case in short: its rate, and the share of the limit that it is nearer to by its number of tokens."""
    if "seconds" not in row:
        return "–"
    rate, share, unit = RATES["read" if row["tokens"] <= FEW else "dot"]
    return f"{row[rate]:.{1 if unit == 'GB/s' else 0}f} ({row[share]:.0%})"


def line(row: dict) -> str:
    """For the terminal, as the case is done."""
    head = f"{shape_of(row):>18} {row['tokens']:>5}  {row['name']:20} "
    if "seconds" not in row:
        return head + row["left_out"]
    return (
        f"{head}{row['seconds'] * 1e3:9.2f} ms {row['gb_per_s']:6.1f} GB/s ({row['read_ratio']:4.0%} of {row['read_gb_per_s']:.0f}) "
        f"{row['gflop_per_s']:5.0f} GF/s ({row['dot_ratio']:4.0%}) {row['calls']:3} calls, spread {row['spread']:.0%}"
    )


def shape_of(row: dict) -> str:
    return ",".join(str(row[name]) for name in ("hidden", "width", "experts", "top_k"))


def fastest(rows: list[dict], engine_is_ours: bool) -> dict | None:
    """The fastest measured row of ours, or of the peers."""
    measured = [row for row in rows if "seconds" in row and (row["engine"] == "lk") == engine_is_ours]
    return min(measured, key=lambda row: row["seconds"], default=None)


def versus(rows: list[dict]) -> str:
    """How many times as fast ours is as the fastest peer; ``rows`` are one family, shape and number of tokens."""
    ours, peer = fastest(rows, True), fastest(rows, False)
    if ours is None or peer is None:
        return "–"
    ratio = peer["seconds"] / ours["seconds"]
    text = f"{ratio:.2f} × {peer['name']}"
    return text if ratio >= 1 else f"*{text}*"


def _table(heading: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heading, ["---"] * len(heading), *body)]


def _groups(rows: list[dict], key) -> list[tuple]:
    order = list(dict.fromkeys(key(row) for row in rows))
    ranked = sorted(rows, key=lambda row: order.index(key(row)))
    return [(name, list(group)) for name, group in groupby(ranked, key)]


def markdown(stored: dict) -> str:
    """Both tables of a run: ours against the fastest peer of each family, then every case."""
    rows, machine = stored["rows"], stored["machine"]
    tokens = sorted({row["tokens"] for row in rows})
    ahead = [
        [shape if first else "", family, *(versus([row for row in members if row["tokens"] == t]) for t in tokens)]
        for shape, of_shape in _groups(rows, shape_of)
        for first, (family, members) in zip([True] + [False] * len(rows), _groups(of_shape, lambda row: row["family"]))
    ]
    every = [
        [shape if first else "", name, f"{members[0]['bits']:g}", *(_cell(members, t) for t in tokens), _error(machine, name)]
        for shape, of_shape in _groups(rows, shape_of)
        for first, (name, members) in zip([True] + [False] * len(rows), _groups(of_shape, lambda row: row["name"]))
        if any("seconds" in row for row in members)
    ]
    columns = [str(t) for t in tokens]
    return "\n".join(
        [
            opening(machine, rows),
            "",
            "Times as fast as the fastest peer of the nearest format, by tokens; *slower* in italics:",
            "",
            *_table(["hidden, width, experts, top-k", "format", *columns], ahead),
            "",
            f"Every case: up to {FEW} tokens GB/s and share of the reader, beyond GFLOP/s and share of the dot-product peak; "
            "error of a small case against float64:",
            "",
            *_table(["hidden, width, experts, top-k", "kernel", "bits", *columns, "error"], every),
            *_absent(machine),
        ]
    )


def opening(machine: dict, rows: list[dict]) -> str:
    peers = [
        f"{about['library']} {about['version']}" + (f" ({about['extension']})" if "extension" in about else f" ({about['build']})")
        for name, about in machine["engines"].items()
        if name != "lk"
    ]
    reads = sorted(row["read_gb_per_s"] for row in rows if "seconds" in row)
    isa = machine["engines"].get("lk", {}).get("isa", "")
    return (
        f"{machine['cpu']}, {machine['threads']} threads, {machine['time'][:10]}; ours `{isa}`, {', '.join(peers)}; the reader got "
        f"{reads[0]:.0f} to {reads[-1]:.0f} GB/s, the dot-product peak is {machine['dot_gflop_per_s']:.0f} GFLOP/s. "
        "`python test/bench/peers run`."
    )


def _cell(members: list[dict], tokens: int) -> str:
    return next((figure(row) for row in members if row["tokens"] == tokens), "–")


def _error(machine: dict, name: str) -> str:
    return f"{machine['errors'][name]['error']:.1e}" if name in machine["errors"] else "–"


def _absent(machine: dict) -> list[str]:
    if not machine["unfit"]:
        return []
    return ["", "Not measured here: " + "; ".join(f"{name} ({why})" for name, why in sorted(machine["unfit"].items())) + "."]
