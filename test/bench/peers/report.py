"""The result of a run: stored as JSON, and as tables for a page.

Nothing is measured here; the tables come from the file alone. Ours is compared with the fastest peer of the same family:
``comparison`` is the short form, ``every_case`` has all figures.
"""

from __future__ import annotations

import json
import statistics
from itertools import groupby
from pathlib import Path

FEW = 8  # up to so many tokens a case is shown as GB/s and share of the reader, beyond as GFLOP/s and share of the peak
DISTURBED = 0.25  # from this spread on, of ours or of the peer, a comparison is marked
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


def ratio(rows: list[dict]) -> float | None:
    """How many times as fast ours is as the fastest peer; ``rows`` are one family, shape and number of tokens."""
    ours, peer = fastest(rows, True), fastest(rows, False)
    return peer["seconds"] / ours["seconds"] if ours and peer else None


def versus(rows: list[dict]) -> str:
    """``rows`` in short: the ratio, then milliseconds of ours : of the fastest peer."""
    times = ratio(rows)
    if times is None:
        return "–"
    ours, peer = fastest(rows, True), fastest(rows, False)
    mark = "~" if max(ours["spread"], peer["spread"]) > DISTURBED else ""
    return f"{mark}{_ratio(times)} ({_ms(ours)} : {_ms(peer)})"


def behind(times: float | None) -> bool:
    return times is not None and round(times, 2) < 1


def _ms(row: dict) -> str:
    """Three digits, without an exponent."""
    ms = row["seconds"] * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _ratio(times: float) -> str:
    return f"**{times:.2f}**" if behind(times) else f"{times:.2f}"


def peers(by_tokens: dict[int, list[dict]]) -> str:
    """The fastest peer, and from how many tokens on it is another one."""
    names = [(tokens, peer["name"]) for tokens, rows in by_tokens.items() if (peer := fastest(rows, False))]
    changes = [(tokens, name) for (tokens, name), before in zip(names, [None, *(name for _, name in names)]) if name != before]
    return ", ".join(name if index == 0 else f"{name} from {tokens}" for index, (tokens, name) in enumerate(changes)) or "–"


def shares(by_tokens: dict[int, list[dict]], limit: str) -> str:
    """Of ours : of the fastest peer. Of ``read``, the median over the cases of few tokens; of ``dot``, the best of the others."""
    few, pick = limit == "read", statistics.median if limit == "read" else max
    share = RATES[limit][1]
    found = []
    for ours in (True, False):
        rows = [row for tokens, rows in by_tokens.items() if (tokens <= FEW) == few and (row := fastest(rows, ours))]
        found.append(f"{pick(row[share] for row in rows) * 100:.0f} %" if rows else "–")
    return " : ".join(found)


def spelled(shape: str) -> str:
    return shape.replace(",", ", ")


def _table(heading: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heading, ["---"] * len(heading), *body)]


def _groups(rows: list[dict], key) -> list[tuple]:
    order = list(dict.fromkeys(key(row) for row in rows))
    ranked = sorted(rows, key=lambda row: order.index(key(row)))
    return [(name, list(group)) for name, group in groupby(ranked, key)]


def markdown(stored: dict, every: bool = False) -> str:
    """A run for a page: ours against the fastest peer of each family or, with ``every``, all cases."""
    rows, machine = stored["rows"], stored["machine"]
    parts = every_case(rows, machine) if every else comparison(rows)
    return "\n".join([opening(machine, rows), "", *parts, *_crashed(rows, machine), *_absent(machine)])


def comparison(rows: list[dict]) -> list[str]:
    tokens = sorted({row["tokens"] for row in rows})
    heading = [*map(str, tokens), "fastest peer", "of read", "of dot"]
    out = [
        "By tokens: times as fast as the fastest peer of the nearest format (ms of ours : of that peer). **Bold**: ours is slower. "
        f"~: the quartiles of one of the two lie more than {DISTURBED * 100:.0f} % of the median apart. `of read`, `of dot`: shares of ours : "
        f"of the peer, of the plain reader up to {FEW} tokens (median) and of the dot-product peak beyond (best).",
        "",
    ]
    lost: dict[str, list[str]] = {}
    compared = 0
    for shape, of_shape in _groups(rows, shape_of):
        body = []
        for family, members in _groups(of_shape, lambda row: row["family"]):
            by_tokens = {t: [row for row in members if row["tokens"] == t] for t in tokens}
            times = {t: ratio(by_tokens[t]) for t in tokens}
            if not any(times.values()):
                continue
            compared += sum(each is not None for each in times.values())
            for t in tokens:
                if behind(times[t]):
                    lost.setdefault(spelled(shape), []).append(f"{family} with {t} ({times[t]:.2f} × {fastest(by_tokens[t], False)['name']})")
            cells = [versus(by_tokens[t]) for t in tokens]
            body.append([family, *cells, peers(by_tokens), shares(by_tokens, "read"), shares(by_tokens, "dot")])
        out += [*_table([spelled(shape), *heading], body), ""] if body else []
    count = sum(len(cases) for cases in lost.values())
    told = "".join(f"; {shape}: {', '.join(cases)}" for shape, cases in lost.items())
    return [*out, f"Ours is slower in {count} of {compared} comparisons{told}."]


def every_case(rows: list[dict], machine: dict) -> list[str]:
    tokens = sorted({row["tokens"] for row in rows})
    body = [
        [shape if first else "", name, f"{members[0]['bits']:g}", *(_cell(members, t) for t in tokens), _error(machine, name)]
        for shape, of_shape in _groups(rows, shape_of)
        for first, (name, members) in zip([True] + [False] * len(rows), _groups(of_shape, lambda row: row["name"]))
        if any("seconds" in row for row in members)
    ]
    return [
        f"Up to {FEW} tokens GB/s and share of the reader, beyond GFLOP/s and share of the dot-product peak; error of a small "
        "case against float64:",
        "",
        *_table(["hidden, width, experts, top-k", "kernel", "bits", *map(str, tokens), "error"], body),
    ]


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


def _crashed(rows: list[dict], machine: dict) -> list[str]:
    found: dict[tuple, str] = {}
    for row in rows:
        if row.get("left_out", "").startswith("crashed") and row["name"] not in machine["unfit"]:
            found.setdefault((row["name"], shape_of(row)), f"{row['name']} at {shape_of(row)}, tokens {row['tokens']} ({row['left_out']})")
    return ["", "Left out: " + "; ".join(found.values()) + "."] if found else []


def _absent(machine: dict) -> list[str]:
    if not machine["unfit"]:
        return []
    return ["", "Not measured here: " + "; ".join(f"{name} ({why})" for name, why in sorted(machine["unfit"].items())) + "."]
