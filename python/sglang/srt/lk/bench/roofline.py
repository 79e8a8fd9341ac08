"""The roofline picture: what each case reached under the two roofs that the machine showed in the same run.

Needs matplotlib, which serving does not; it comes with the extra ``bench``.
"""

from __future__ import annotations

import math
from pathlib import Path

COLOURS = {
    "bf16": "#1f77b4",
    "f16": "#6baed6",
    "fp8": "#7570b3",
    "fp8_block": "#9e9ac8",
    "mxfp8": "#54278f",
    "mxfp4": "#d95f02",
    "nvfp4": "#1b9e77",
    "int4": "#e7298a",
    "int4_zeros": "#a6761d",
}
MARKERS = "osD^vP*X"


def require_matplotlib():
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib (or sglang-lk[bench])"
        ) from error
    return Figure


def draw(machine: dict, rows: list[dict], path: Path) -> None:
    """Write a PNG. ``rows`` and ``machine`` are those of the JSON file, so stored runs can be drawn again."""
    figure = require_matplotlib()(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of expert weights",
        ylabel="GFLOP/s",
        title=f"Expert calls · {machine['cpu']} · {rows[0]['threads']} threads",
    )
    intensity = [row["gflop_per_s"] / row["gb_per_s"] for row in rows]
    left, right = min(intensity) / 2, max(intensity) * 2
    _roofs(axes, rows, left, right)
    shapes = sorted({_shape(row) for row in rows})
    for row, x in zip(rows, intensity):
        axes.plot(
            x,
            row["gflop_per_s"],
            MARKERS[shapes.index(_shape(row)) % len(MARKERS)],
            color=COLOURS.get(row["format"], "#666666"),
            markersize=8,
            markeredgecolor="white",
            linestyle="none",
            label=f"{row['format']} {row['isa']} {_shape(row)}",
        )
    _label_shares(axes, rows, intensity)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom=min(row["gflop_per_s"] for row in rows) / 3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    axes.grid(True, which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(handles.values(), handles.keys(), fontsize=8, loc="lower right", frameon=False)
    figure.savefig(path, dpi=150, format="png")


def _label_shares(axes, rows: list[dict], intensity: list[float]) -> None:
    """The share of the nearer limit beside each point; points that all but coincide get one label."""
    labelled: list[tuple[float, float]] = []
    for row, x in zip(rows, intensity):
        share, y = max(row["read_ratio"], row["dot_ratio"]), row["gflop_per_s"]
        if all(abs(math.log(x / a)) > 0.3 or abs(math.log(y / b)) > 0.06 for a, b in labelled):
            labelled.append((x, y))
            axes.annotate(
                f"{share:.0%}",
                (x, y),
                textcoords="offset points",
                xytext=(-9, -3),
                ha="right",
                fontsize=8,
                color=COLOURS.get(row["format"], "#666666"),
            )


def _roofs(axes, rows: list[dict], left: float, right: float) -> None:
    """One roof per instruction set: the memory's slope, then the flat dot-product peak."""
    read = max(row["read_gb_per_s"] for row in rows)
    for isa in sorted({row["isa"] for row in rows}):
        peak = max(row["dot_gflop_per_s"] for row in rows if row["isa"] == isa)
        knee = peak / read
        corner = [(left, left * read)] + [(knee, peak)] * (left < knee < right) + [(right, min(peak, right * read))]
        axes.plot(*zip(*corner), color="#999999", linewidth=1.2, zorder=0)
        axes.annotate(
            f"{isa} dot peak {peak:.0f} GFLOP/s",
            (right, peak),
            textcoords="offset points",
            xytext=(-4, 4),
            ha="right",
            fontsize=8,
            color="#666666",
        )
    axes.annotate(
        f"reader {read:.0f} GB/s",
        (left, left * read),
        textcoords="offset points",
        xytext=(6, 10),
        fontsize=8,
        color="#666666",
    )


def _shape(row: dict) -> str:
    return f"{row['hidden']},{row['width']},{row['experts']},{row['top_k']}"
