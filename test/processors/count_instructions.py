"""Instructions per byte of weights on Arm, counted under qemu: the table of docs/explanation/performance.md.

    python test/processors/count_instructions.py [ROWS…]

Executed, not guessed from a listing: the difference between one pass and three over an expert's weights. It says how
much a kernel asks of a processor, not how fast the processor is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from builds import PLAIN, Build, need

SOURCE = Path(__file__).with_name("count_instructions.c")
FORMATS = ("bf16", "f16", "fp8_block128", "mxfp8", "mxfp4", "nvfp4", "int4_group128")
ISAS = ("neon", "neon_bf16")


def plugin(folder: Path) -> Path:
    need("cc", "gcc")
    library = folder / "count_instructions.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
    return library


def executed(build: Build, library: Path, isa: str, form: str, rows: int, passes: int) -> tuple[int, int]:
    """Instructions of a run, and the bytes of weights of one pass."""
    done = build.run("--isa", isa, "--format", form, "--work", str(rows), str(passes), cpu="max", plugin=library)
    return int(re.search(r"instructions: (\d+)", done.stderr)[1]), int(re.search(r"(\d+) bytes of weights", done.stdout)[1])


def per_byte(build: Build, library: Path, isa: str, form: str, rows: int) -> float:
    one, size = executed(build, library, isa, form, rows, 1)
    return (executed(build, library, isa, form, rows, 3)[0] - one) / 2 / size


def main() -> None:
    build = PLAIN["aarch64"]
    build.make()
    library = plugin(build.folder)
    rows = [int(word) for word in sys.argv[1:]] or [1, 4, 64]
    print("| format |" + "".join(f" {isa}, {n} |" for isa in ISAS for n in rows))
    print("| --- |" + " --- |" * len(ISAS) * len(rows))
    for form in FORMATS:
        counts = [per_byte(build, library, isa, form, n) / n for isa in ISAS for n in rows]
        print(f"| {form} |" + "".join(f" {count:.2f} |" for count in counts), flush=True)


if __name__ == "__main__":
    main()
