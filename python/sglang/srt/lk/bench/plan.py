"""From the command's options and LK_* to one plan, or one message with everything that is wrong.

Measures nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from sglang.srt.lk import config, cpus
from sglang.srt.lk.bench import cases, weights
from sglang.srt.lk.bench.kernels import Plan

T = TypeVar("T")


def make(options: argparse.Namespace, environ: Mapping[str, str], ext) -> Plan:
    problems: list[str] = []
    isas = [isa["name"] for isa in ext.isas() if isa["supported"]]
    settings = _settings(environ, isas, problems, threads=options.threads)
    shapes = _parsed(cases.parse_shape, options.shape or map(str, cases.DEFAULT_SHAPES), problems)
    rows = _parsed(cases.parse_rows, options.rows or cases.DEFAULT_ROWS, problems)
    formats = options.format or list(weights.FILLS)
    chosen = isas if "all" in (options.isa or ()) else options.isa or [settings.isa or isas[-1]]
    problems += [f"--format {name}: known are {', '.join(weights.FILLS)}" for name in formats if name not in weights.FILLS]
    problems += [
        f"--isa {name}: this machine runs {', '.join(isas)}, or all of them with all" for name in chosen if name not in isas
    ]
    if options.repeats < 7:
        problems.append(f"--repeats {options.repeats}: at least 7, or the median means little")
    if not 0 < options.seconds < math.inf:
        problems.append(f"--seconds {options.seconds}: a number above 0 is needed")
    _refuse(problems)
    workers = cpus.usable(settings)
    return Plan(
        isas=chosen,
        formats=formats,
        shapes=shapes,
        rows=rows,
        cpus=workers.cpus,
        nodes=len(set(workers.nodes)),
        seconds=options.seconds,
        repeats=options.repeats,
        bind="node" if settings.thread_binding == "NUMA_NODE" else "core",
        spin_us=0 if settings.power_saving else 200,
        huge=settings.numa_huge,
        placement=workers.placement(settings),
        warnings=[line if options.threads is None else line.replace("LK_THREADS=", "--threads ") for line in workers.warnings],
    )


def settings(environ: Mapping[str, str], ext) -> config.Config:
    """LK_* as a server with the switch on would read them."""
    problems: list[str] = []
    found = _settings(environ, [isa["name"] for isa in ext.isas() if isa["supported"]], problems)
    _refuse(problems)
    return found


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problem{'s' * (len(problems) > 1)}", *problems]))


def _settings(
    environ: Mapping[str, str], isas: list[str], problems: list[str], *, threads: int | None = None
) -> config.Config:
    """The same, with --threads in the place of LK_THREADS, or the defaults after adding problems."""
    given = {**environ, config.SWITCH: "1"}
    if threads is not None:
        kind = config.VARIABLES["LK_THREADS"].kind
        fits = kind.minimum <= threads <= kind.maximum
        problems += [] if fits else [f"--threads {threads}: {kind.label} is needed"]
        given["LK_THREADS"] = str(threads) if fits else ""
    try:
        return config.load(given, isas=lambda: isas)
    except config.ConfigError as error:
        problems += error.problems
        return config.Config()


def _parsed(parse: Callable[[str], T], texts: Iterable[str], problems: list[str]) -> list[T]:
    values = []
    for text in texts:
        try:
            values.append(parse(text))
        except ValueError as error:
            problems.append(str(error))
    return values
