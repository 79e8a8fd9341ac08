"""Builds of ``lk_selfcheck``: for this processor, for the other architecture, with sanitizers; and how each is run.

A build stays in ``build/processors`` and is brought up to date. What a build needs is named when it is missing.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "sgl-kernel-ext"
HERE = platform.machine()
CROSS = Path(__file__).parent / "aarch64.cmake"


class Missing(Exception):
    """Names the package to install."""


@dataclass
class Build:
    name: str
    machine: str = HERE
    sanitize: str = ""
    isas: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    made: bool = False

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "processors" / self.name

    @property
    def emulator(self) -> str:
        return f"qemu-{self.machine}"

    def tool(self, name: str) -> str:
        """A program of the compiler's or binutils, for this build's machine."""
        return name if self.machine == HERE else f"{self.machine}-linux-gnu-{name}"

    def make(self) -> Path:
        """The program, up to date."""
        program = self.folder / "lk_selfcheck"
        if self.made:
            return program
        need("cmake", "cmake")
        settings = ["-DLK_EXTENSION=OFF", f"-DLK_SANITIZE={self.sanitize}", f"-DLK_ISAS={self.isas}"]
        if self.sanitize:
            settings.append("-DLK_SOFT_TILES=ON")  # the loops of matrix multipliers, also where there is none
        if self.machine != HERE:
            need("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
            settings.append(f"-DCMAKE_TOOLCHAIN_FILE={CROSS}")
        command(["cmake", "-S", str(SOURCE), "-B", str(self.folder), *settings])
        command(["cmake", "--build", str(self.folder), "--target", "lk_selfcheck", "--parallel", "2"])
        self.made = True
        return program

    def run(self, *args: str, cpu: str = "", plugin: Path | None = None) -> subprocess.CompletedProcess:
        """The self-check; see ``execute``."""
        return self.execute(self.make(), *args, cpu=cpu, plugin=plugin)

    def execute(self, program: Path, *args: str, cpu: str = "", plugin: Path | None = None) -> subprocess.CompletedProcess:
        """A program, emulated where ``cpu`` names a model or the machine is another one; ``plugin`` is qemu's."""
        call = [str(program), *args]
        if cpu or self.machine != HERE:
            need(self.emulator, "qemu-user")
            libraries = ["-L", f"/usr/{self.machine}-linux-gnu"] if self.machine != HERE else []
            watched = ["-plugin", str(plugin)] if plugin else []
            call = [self.emulator, *libraries, *watched, *(["-cpu", cpu] if cpu else []), *call]
        return subprocess.run(call, capture_output=True, text=True, timeout=3600, env=os.environ | self.environ)

    def core_objects(self) -> list[Path]:
        """Everything outside the kernel tables."""
        self.make()
        return sorted((self.folder / "CMakeFiles/lk_selfcheck.dir").rglob("*.o"))

    def isa_objects(self) -> dict[str, Path]:
        self.make()
        found = (self.folder / "CMakeFiles" / f"lk_{isa}.dir/kernels.cpp.o" for isa in ROWS)
        return {path.parent.name[3:-4]: path for path in found if path.exists()}


ROWS = re.findall(r"lk_isa\(NAME (\w+)", (SOURCE / "CMakeLists.txt").read_text())
PLAIN = {machine: Build(machine, machine) for machine in dict.fromkeys([HERE, "aarch64"])}
SANITIZED = [
    Build("address", sanitize="address,undefined", environ={"UBSAN_OPTIONS": "print_stacktrace=1"}),
    # Which threads share what does not depend on the registers they use.
    Build("thread", sanitize="thread", isas="scalar;soft_tiles", environ={"TSAN_OPTIONS": "halt_on_error=1"}),
]


def need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise Missing(f"{program} is not installed (apt-get install {package})")


def command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
