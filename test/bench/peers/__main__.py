"""The command: ``python test/bench/peers run|table|pack|install``. See the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from peers import cases, install, measure, report  # noqa: E402  (after the path is set)

ENGINES = ("lk", "kt", "llama")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="peers", description="Expert calls of this project and of its peers side by side.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="install what is missing, check every kernel, measure all side by side")
    run.add_argument("--quick", action="store_true", help="one shape, three numbers of tokens, four formats")
    run.add_argument("--shape", action="append", metavar="H,W,E,K", help="hidden, width, experts, experts per token")
    run.add_argument("--tokens", action="append", type=int, metavar="N")
    run.add_argument("--family", action="append", choices=cases.FAMILIES, metavar="NAME", help=", ".join(cases.FAMILIES))
    run.add_argument("--engine", action="append", choices=ENGINES, help="peers to measure beside ours (lk)")
    run.add_argument("--without", action="append", default=[], metavar="PATTERN", help="kernels to leave out, as in '*-avx2'")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--seconds", type=float, default=0.1, help="for one case in each of its two passes")
    run.add_argument("--cache-mib", type=int, help="last-level cache, where the system does not say it rightly")
    run.add_argument("--check-only", action="store_true", help="compare every kernel with float64 and stop")
    run.add_argument("--json", type=Path, metavar="FILE")
    table = commands.add_parser("table", help="a stored run as markdown: ours against the fastest peer")
    table.add_argument("file", type=Path)
    table.add_argument("--every", action="store_true", help="all cases instead of ours against the fastest peer")
    pack = commands.add_parser("pack", help="a folder with all that a machine without a network needs")
    pack.add_argument("folder", type=Path)
    pack.add_argument("--python", default="%d.%d" % sys.version_info[:2], help="of that machine")
    pack.add_argument("--cpu", action="append", choices=list(install.GGML_BUILDS), help="of that machine; sapphirerapids has AMX")
    pack.add_argument("--extension", type=Path, help="this project's sgl_kernel_ext*.so, built for that Python")
    commands.add_parser("install", help="only install")
    return top


def last_level_cache() -> int:
    """Bytes of the largest cache of the first usable processor, 32 MiB where the system does not say."""
    cpu = min(os.sched_getaffinity(0))
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text().strip() for path in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*/size")]
    return max([int(size[:-1]) * units[size[-1]] for size in sizes], default=32 << 20)


def parse_shape(text: str) -> cases.Shape:
    numbers = text.split(",")
    if len(numbers) != 4 or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--shape {text}: four numbers HIDDEN,WIDTH,EXPERTS,TOP_K are needed, as in {cases.SHAPES[0]}")
    return cases.Shape(*map(int, numbers))


def plan_of(options: argparse.Namespace) -> measure.Plan:
    shapes = [parse_shape(text) for text in options.shape or []]
    quick = options.quick
    cache = install.cache_folder()
    engines = dict.fromkeys(["lk", *(options.engine or ENGINES)])
    return measure.Plan(
        shapes=tuple(shapes) or (cases.QUICK_SHAPES if quick else cases.SHAPES),
        tokens=tuple(sorted(options.tokens or (cases.QUICK_TOKENS if quick else cases.TOKENS))),
        families=tuple(options.family or (cases.QUICK_FAMILIES if quick else cases.FAMILIES)),
        engines=tuple(engines),
        threads=options.threads,
        cache=cache,
        log=cache / "last-run.log",
        cache_bytes=options.cache_mib << 20 if options.cache_mib else last_level_cache(),
        seconds=options.seconds,
        without=tuple(options.without),
    )


def run(options: argparse.Namespace) -> int:
    plan, started = plan_of(options), time.monotonic()
    install.ensure(plan.cache, say)
    plan.log.write_bytes(b"")
    made, found = measure.Run(plan, say), []
    try:
        say("each kernel against float64:")
        made.check()
        for case in [] if options.check_only else made.measure():
            found.append(case)
            say(report.line(case.row(made.dot)))
            if options.json:
                report.store(options.json, measure.facts(made), [done.row(made.dot) for done in found])
        say(f"{time.monotonic() - started:.0f} s; what the peers printed is in {plan.log}")
        wrong = [name for name, why in made.unfit.items() if why.startswith("wrong")]
        ends = [*made.unfit.items(), *((case.variant.name, case.left_out) for case in found)]
        crashed = list(dict.fromkeys(name for name, why in ends if why.startswith("crashed")))
        if wrong:
            say(f"driven wrongly, or wrong: {', '.join(wrong)}")
        if crashed:
            say(f"crashed: {', '.join(crashed)}")
        return 1 if wrong or any(name.startswith("lk-") for name in crashed) else 0
    finally:
        made.close()


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    options = parser().parse_args()
    try:
        if options.command == "run":
            return run(options)
        if options.command == "table":
            say(report.markdown(report.load(options.file), options.every))
        elif options.command == "install":
            install.ensure(install.cache_folder(), say)
        else:
            builds = options.cpu or ["sapphirerapids"]
            size = install.pack(options.folder, install.cache_folder(), options.python, builds, options.extension, say)
            say(f"{options.folder}: {size / (1 << 20):.1f} MiB; there: PEERS_EXTENSION=. python3 peers run --json out.json")
        return 0
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
