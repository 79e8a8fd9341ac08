"""Two versions of the kernels by turns in one process: ``python test/bench/turns before=HEAD~1 after=.``

Whole calls (``sglang-lk bench kernels``) say how fast the engine is, and swing by several percent on a machine that is
shared. This says what a change to ``sgl-kernel-ext/{isa,format,shape}`` costs or wins: one thread, one product after
another, every version in turn, each followed by the peak of its dot product. Differences of half a percent show.

A version is NAME=TREE, TREE a folder or a git revision. Each is compiled with its own CMakeLists.txt and then given a
name of its own; they meet in kernels.h, which must be the same in all. Tiles read rows that lie side by side: what the
engine saves by writing them in tiles is not seen here.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXTENSION = "sgl-kernel-ext"
FORMATS = ("bf16", "f16", "fp8", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "int4_zeros")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="turns", description="Versions of the kernels by turns in one process.")
    top.add_argument("versions", nargs="+", metavar="NAME=TREE", help="a folder or a git revision; the others are compared with the first")
    top.add_argument("--isa", required=True, help="instruction set, as in sgl-kernel-ext/isa")
    top.add_argument("--format", action="append", choices=FORMATS, metavar="NAME", help=", ".join(FORMATS) + "; default: all")
    top.add_argument("--rows", action="append", type=int, metavar="N", help="rows of one expert; default: 1, 4 and 128")
    top.add_argument("--shape", default="2048,768", metavar="HIDDEN,WIDTH")
    top.add_argument("--seconds", type=float, default=1.0, help="for each phase of a case")
    top.add_argument("--cpu", type=int, help="the one to run on; default: the last of those given to the process")
    return top


def tree_of(text: str, scratch: Path) -> Path:
    """The version's kernel sources: a checkout's, or those of a revision, written to ``scratch``."""
    for folder in (Path(text), Path(text) / EXTENSION):
        if (folder / "kernels.h").is_file():
            return folder.resolve()
    archive = subprocess.run(["git", "-C", ROOT, "archive", text, EXTENSION], capture_output=True)
    if archive.returncode:
        raise ValueError(f"{text} is neither a folder with the kernels nor a git revision ({archive.stderr.decode().strip()})")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / EXTENSION


def run(*command: str | Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command[:4]))} … failed:\n{done.stdout[-2000:]}")


def compiled(name: str, tree: Path, isa: str, scratch: Path) -> Path:
    """The object of one instruction set, its table renamed from ``lk_kernels_<isa>`` to ``lk_kernels_<name>``."""
    if not (tree / "isa" / f"{isa}.h").is_file():
        raise ValueError(f"{name} has no instruction set {isa}")
    build = scratch / "build"
    run("cmake", "-S", tree, "-B", build, "-DLK_EXTENSION=OFF", f"-DLK_ISAS=scalar;{isa}")
    run("cmake", "--build", build, "--target", f"lk_{isa}")
    found = build.rglob(f"lk_{isa}.dir/kernels.cpp.o")
    renamed = scratch / f"{name}.o"
    run("objcopy", f"--redefine-sym=lk_kernels_{isa}=lk_kernels_{name}", next(found), renamed)
    return renamed


def program(versions: dict[str, Path], isa: str, scratch: Path) -> Path:
    contracts = {(tree / "kernels.h").read_text() for tree in versions.values()}
    if len(contracts) > 1:
        raise ValueError("the versions' kernels.h differ, so they cannot be in one program: measure them with `sglang-lk bench kernels` and `bench compare`")
    objects = []
    for name, tree in versions.items():
        folder = scratch / name
        folder.mkdir(exist_ok=True)
        print(f"Compiling {name} ({tree})", file=sys.stderr)
        objects.append(compiled(name, tree, isa, folder))
    here, first = scratch / "turns", next(iter(versions.values()))
    names = " ".join(f"X({name})" for name in versions)
    sources = [Path(__file__).with_name("turns.cpp"), first / "cpu.cpp", first / "memory.cpp"]
    run(os.environ.get("CXX", "c++"), "-std=c++20", "-O2", f"-I{first}", f"-DVARIANTS={names}", *sources, *objects, "-o", here)
    return here


def main() -> None:
    options = parser().parse_args()
    versions = dict(word.partition("=")[::2] for word in options.versions)
    wrong = [name for name, tree in versions.items() if not name.isidentifier() or not tree]
    hidden, _, width = options.shape.partition(",")
    if wrong or len(versions) != len(options.versions):
        raise ValueError(f"NAME=TREE is needed, each NAME once and of letters: {' '.join(options.versions)}")
    if not (hidden.isdecimal() and width.isdecimal() and int(hidden) and int(width)):
        raise ValueError(f"--shape {options.shape}: two numbers HIDDEN,WIDTH are needed, as in 2048,768")
    if any(rows < 1 for rows in options.rows or ()) or not 0 < options.seconds < math.inf:
        raise ValueError("--rows and --seconds must be numbers above 0")
    cpu = max(os.sched_getaffinity(0)) if options.cpu is None else options.cpu
    if cpu not in os.sched_getaffinity(0):
        raise ValueError(f"--cpu {cpu}: this process may use {sorted(os.sched_getaffinity(0))}")
    with tempfile.TemporaryDirectory() as scratch:
        trees = {}
        for name, text in versions.items():
            (Path(scratch) / name).mkdir()
            trees[name] = tree_of(text, Path(scratch) / name)
        measured = program(trees, options.isa, Path(scratch))
        os.sched_setaffinity(0, {cpu})
        wide = max(map(len, versions))
        print(f"{'format':<11}{'rows':>5}  {'phase':<8} {'version':<{wide}} {'us':>9} {'of dot':>7} {'time':>7} {'spread':>7}  bits")
        for fmt in options.format or FORMATS:
            for rows in options.rows or (1, 4, 128):
                done = subprocess.run([measured, fmt, str(rows), str(options.seconds), hidden, width], capture_output=True, text=True)
                if done.returncode:
                    said = done.stderr.strip() or f"does this processor have {options.isa}?"
                    raise ValueError(f"the program ended with status {done.returncode} at {fmt} with {rows} rows: {said}")
                for line in done.stdout.splitlines():
                    phase, name, seconds, share, ratio, spread, same = line.split()
                    print(f"{fmt:<11}{rows:>5}  {phase:<8} {name:<{wide}} {float(seconds) * 1e6:>9.1f} {float(share):>7.1%} {float(ratio):>7.3f}"
                          f" {float(spread):>7.1%}  {'same' if same == '1' else 'OTHER'}", flush=True)  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"turns: {error}")
