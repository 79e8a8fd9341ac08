"""The command line ``sglang-lk``: arguments in, exit status out.

Only parsing and wiring; what the commands do is in ``doctor`` and ``bench``, imported when asked for. Exit status:
0 all well, 1 the answer is "no" (a problem stops serving, a case got slower), 2 the question was wrong.
A new command is a function ``_name`` and its block in ``parser``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang.srt.lk.term import Style, table, write


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✓ or µ
    arguments = parser().parse_args(argv)
    try:
        _check_outputs(arguments)
        return arguments.run(arguments)
    except BrokenPipeError:  # nobody reads on
        _drop_output()
        return 141
    except (ValueError, MemoryError, OSError) as error:  # what was asked for cannot be done; the message says what can
        if isinstance(error, OSError):
            _drop_output()
        write(f"sglang-lk: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        write("\nsglang-lk: stopped", sys.stderr)
        return 130


def _check_outputs(arguments: argparse.Namespace) -> None:
    """That the files which are asked for can be written: before the minutes of measuring, not after."""
    for option in ("json", "plot"):
        path = getattr(arguments, option, None)
        if isinstance(path, Path):
            with _writing(option, path):
                _try_to_write(path)


def _try_to_write(path: Path) -> None:
    new = not path.exists()
    if new or path.is_file() or path.is_dir():  # a pipe is opened only once
        path.open("ab").close()
    if new:
        path.unlink()


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"--{option} {path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _stored(path: Path | None, rows: list, *, machine: dict | None = None) -> Iterator[None]:
    """``rows`` go to --json at the end, those of a run that failed or was stopped too. Without any the file stays as it is."""
    try:
        yield
    finally:
        if path and rows:
            made = [row.as_dict() for row in rows]
            with _writing("json", path):
                path.write_text(json.dumps({"machine": machine, "rows": made} if machine else made, indent=1) + "\n")


def _at_least(arguments: argparse.Namespace, **least: int) -> None:
    """That these options, those which may be repeated too, are not too small."""
    given = {name: getattr(arguments, name, None) for name in least}
    said = [
        f"--{name} {value}: at least {least[name]}"
        for name, values in given.items()
        for value in (values if isinstance(values, list) else [values])
        if value is not None and value < least[name]
    ]
    if said:
        raise ValueError("; ".join(said))


def _show(arguments: argparse.Namespace, text: str) -> None:
    """What a measurement prints. It goes on without a reader where a file is asked for, too."""
    try:
        write(text)
    except BrokenPipeError:
        if not arguments.json and not getattr(arguments, "plot", None):
            raise
        _drop_output()


def _drop_output() -> None:
    """Nothing more is printed, nor what is still buffered: Python would fail on it when it ends."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="sglang-lk", description="Look at a machine and at the CPU expert kernels; serves nothing."
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    bench = commands.add_parser(
        "bench", help="measure, and compare measurements", description="Measure, and compare measurements."
    )
    measures = bench.add_subparsers(title="what", metavar="WHAT", required=True)
    _add_kernels(measures)
    _add_compare(measures)
    _add_handover(measures)
    for what in ("decode", "prefill"):
        _add_serving(measures, what)
    return top


def _add_doctor(commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine offers and what would stop serving",
        description="Say what this machine offers, which role each layer of a model would get, and what would stop serving, "
        "with remedies. Starts nothing. Exit status 1 if something would stop serving.",
    )
    doctor.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL_DIR",
        help="checkpoint to plan (config.json and headers are read, no weights)",
    )
    doctor.add_argument(
        "--device", choices=("cpu", "cuda"), help="what the server will run on (default: cuda where a card is, else cpu)"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    doctor.add_argument("--no-bandwidth", action="store_true", help="skip the second of reading memory")
    doctor.set_defaults(run=_doctor)


def _add_kernels(measures) -> None:
    kernels = measures.add_parser(
        "kernels",
        help="time expert calls against this machine's memory and dot-product peak",
        description="Time complete expert calls for every shape, format and number of rows, each between two looks at "
        "the machine: a plain memory reader (2 MB pages) and the dot-product peak. Options marked + may be repeated.",
    )
    add = kernels.add_argument
    add(
        "--shape",
        action="append",
        metavar="H,I,E,K",
        help="+ hidden, width, experts, experts per token (default: 2048,768,128,8 and 4096,2048,32,6)",
    )
    add("--format", action="append", metavar="NAME", help="+ weight format (default: all that the extension has)")
    add("--isa", action="append", metavar="NAME", help="+ instruction set, or all (default: LK_ISA, else the best)")
    add(
        "--rows",
        action="append",
        metavar="N",
        help="+ tokens in the batch, as 1, or rows for each expert, as 128/expert (default: these two)",
    )
    add("--threads", type=int, metavar="N", help="worker threads (default: LK_THREADS, else every usable core)")
    add("--seconds", type=float, default=1.0, metavar="S", help="least time spent on one case (default: 1)")
    add("--repeats", type=int, default=7, metavar="N", help="batches of calls whose median counts, at least 7 (default: 7)")
    add("--json", type=Path, metavar="FILE", help="store machine and rows")
    add("--plot", type=Path, metavar="FILE", help="draw a roofline as PNG (needs matplotlib)")
    kernels.set_defaults(run=_kernels)


def _add_compare(measures) -> None:
    compare = measures.add_parser(
        "compare",
        help="compare two results of bench kernels --json",
        description="Compare the cases that two results of bench kernels --json share, by their share of the machine. "
        "Exit status 1 if one fell by more than the tolerance.",
    )
    compare.add_argument("first", type=Path, metavar="A.json")
    compare.add_argument("second", type=Path, metavar="B.json")
    compare.add_argument(
        "--tolerance", type=float, default=0.1, metavar="X", help="fall of the share that counts as slower (default: 0.1)"
    )
    compare.set_defaults(run=_compare)


def _add_handover(measures) -> None:
    handover = measures.add_parser(
        "handover",
        help="time the way from the GPU to the CPU experts and back",
        description="Time the hand-over of a layer's rows from the GPU to the CPU and back, captured in a CUDA graph, over the "
        "same graph without it and less what the CPU computes; by mailbox and by host functions. Needs a GPU.",
    )
    add = handover.add_argument
    add("--hidden", type=int, default=2048, metavar="H", help="elements of a row, bf16 (default: 2048)")
    add("--rows", type=int, action="append", metavar="N", help="rows of a batch, may be repeated (default: 1, 4 and 32)")
    add("--layers", type=int, default=40, metavar="N", help="layers in the graph (default: 40)")
    add("--samples", type=int, default=9, metavar="N", help="samples whose median counts (default: 9)")
    add("--json", type=Path, metavar="FILE", help="store the rows")
    handover.set_defaults(run=_handover)


def _add_serving(measures, what: str) -> None:
    measured = "a decode step" if what == "decode" else "a prefill"
    serving = measures.add_parser(
        what,
        help=f"time {measured} of a model's shape without its weights",
        description=f"Start a server of random weights with a model's shape and time {measured} from outside, so that you know "
        "before a download how fast it would be here. LK_* and everything after -- go to the server.",
    )
    add = serving.add_argument
    add("--model-config", required=True, metavar="NAME|PATH", help="a shipped shape, a config.json or a folder with one")
    add("--experts", choices=("bf16", "mxfp4", "nvfp4"), help="how experts are written (default: as the config says)")
    add("--layers", type=int, metavar="N", help="only the first N layers")
    add("--batch", type=int, action="append", metavar="N", help="requests at a time, may be repeated (default: 1)")
    add("--prompt", type=int, default=16 if what == "decode" else 2048, metavar="N", help="tokens of a prompt (default: %(default)s)")
    if what == "decode":
        add("--tokens", type=int, default=64, metavar="N", help="decode steps of a sample (default: 64)")
    add("--repeats", type=int, default=5, metavar="N", help="samples whose median counts, at least 2 (default: 5)")
    add("--json", type=Path, metavar="FILE", help="store the rows")
    add("flags", nargs="*", metavar="-- FLAG", help="flags of sglang serve")
    serving.set_defaults(run=_serving, what=what)


def _doctor(arguments: argparse.Namespace) -> int:
    from sglang.srt.lk import doctor, doctor_text

    report = doctor.examine(arguments.model, os.environ, device=arguments.device, bandwidth=not arguments.no_bandwidth)
    if arguments.json:
        write(json.dumps(report.as_dict(), indent=1))
    else:
        write("\n".join(doctor_text.render(report, Style.of(sys.stdout))))
    return 0 if report.ok else 1


def _kernels(arguments: argparse.Namespace) -> int:
    from sglang.srt.lk.bench import kernels, plan, report, roofline

    if arguments.plot:
        roofline.require_matplotlib()  # before the minutes of measuring, not after
    ext = _extension()
    todo = plan.make(arguments, os.environ, ext)
    for line in todo.warnings:
        write(f"sglang-lk: {line}", sys.stderr)
    style, rows = Style.of(sys.stdout), []
    found = report.facts(ext, todo)
    _show(arguments, "\n".join([*report.opening(found, style), "", report.heading(style)]))
    with _stored(arguments.json, rows, machine=found):
        for row in kernels.run(ext, todo):
            rows.append(row)
            _show(arguments, report.line(row, style))
    if arguments.plot:
        with _writing("plot", arguments.plot):
            roofline.draw(found, [row.as_dict() for row in rows], arguments.plot)
    return 0


def _handover(arguments: argparse.Namespace) -> int:
    from sglang.srt.lk.bench import handover, plan

    _at_least(arguments, hidden=handover.WIDTH, rows=1, layers=1, samples=2)
    settings = plan.settings(os.environ, _extension())
    from sglang.srt.lk import driver, kernels  # torch is imported only now

    rows = []
    measured = handover.run(
        settings=settings, hidden=arguments.hidden, rows=arguments.rows or [1, 4, 32], layers=arguments.layers, samples=arguments.samples
    )
    try:
        with _stored(arguments.json, rows):
            for row in measured:
                rows.append(row)
                _show(arguments, "\n".join(handover.lines(rows)[0 if len(rows) == 1 else -1 :]))
    except (kernels.KernelError, driver.DriverError) as error:
        write(f"sglang-lk: {error}", sys.stderr)
        return 1
    return 0


def _serving(arguments: argparse.Namespace) -> int:
    from sglang.srt.lk.bench import serving

    _at_least(arguments, batch=1, prompt=1, tokens=1, repeats=2)
    rows = []
    try:
        with _stored(arguments.json, rows):
            for found in serving.run(arguments, os.environ):
                if isinstance(found, str):
                    _show(arguments, found)
                else:
                    rows.append(found)
                    _show(arguments, "\n".join(serving.lines(rows)[0 if len(rows) == 1 else -1 :]))
    except serving.ServerFailed as error:
        write(f"sglang-lk: {error}", sys.stderr)
        return 1
    return 0


def _extension():
    try:
        import sgl_kernel_ext
    except ImportError as error:
        raise ValueError(
            f"the kernels (sgl_kernel_ext) cannot be imported: {error}; install the sglang-lk wheel for this Python"
        ) from error
    return sgl_kernel_ext


def _compare(arguments: argparse.Namespace) -> int:
    from sglang.srt.lk.bench.compare import compare

    if not 0 <= arguments.tolerance < 1:  # nor if it is not a number
        raise ValueError(f"--tolerance {arguments.tolerance}: a number from 0 to less than 1 is needed, such as 0.1")
    style, changes = Style.of(sys.stdout), compare(arguments.first, arguments.second)
    rows = [["hidden,width,experts,k", "format", "isa", "rows", "share of", "A", "B", "B/A", ""]]
    slower = 0
    for change in changes:
        h, i, e, k, fmt, isa, batch, _ = change.key
        worse = change.ratio < 1 - arguments.tolerance
        slower += worse
        mark = (
            style("red", "slower") if worse else style("green", "faster") if change.ratio > 1 + arguments.tolerance else ""
        )
        rows.append(
            [
                f"{h},{i},{e},{k}",
                fmt,
                isa,
                str(batch),
                change.limit,
                f"{change.before:.0%}",
                f"{change.after:.0%}",
                f"{change.ratio:.2f}",
                mark,
            ]
        )
    write(
        "\n".join(
            [
                *table(rows, "<<<><>>><"),
                "",
                f"{len(changes)} cases compared, {slower} slower by more than {arguments.tolerance:.0%}",
            ]
        )
    )
    return 1 if slower else 0
