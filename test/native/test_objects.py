"""What the compiled extension may contain: one exported symbol per instruction set, wide instructions only inside them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sgl_kernel_ext as ext

SOURCE = Path(__file__).resolve().parents[2] / "sgl-kernel-ext"


def tool(name: str, *args: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (binutils)")
    return subprocess.run([name, *args], check=True, capture_output=True, text=True).stdout


def test_the_module_exports_nothing_but_its_entry_point():
    symbols = tool("nm", "-D", "--defined-only", ext.__file__)
    names = {line.split()[-1] for line in symbols.splitlines() if line.split()[-2] not in "wVWu"}
    assert names == {"PyInit_sgl_kernel_ext"}


@pytest.mark.parametrize("isa", [row["name"] for row in ext.isas()])
def test_an_isa_object_exports_one_symbol(isa, tmp_path):
    """A weak template symbol built for one instruction set could be picked by the linker for everyone."""
    compiler = shutil.which("g++") or pytest.skip("g++ is not installed")
    rows = re.search(rf"lk_isa\(NAME {isa} TYPE (\w+)([^)]*)\)", (SOURCE / "CMakeLists.txt").read_text())
    skylake = re.search(r"set\(skylake ([^)]*)\)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
    flags = rows.group(2).replace("${skylake}", skylake).split("NEEDS")[0].replace("FLAGS", "").split()
    out = tmp_path / f"{isa}.o"
    # -O1: which symbols exist does not depend on the optimisation, compile time does.
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-w", *flags, f"-DLK_ISA_NAME={isa}",
               f"-DLK_ISA_TYPE={rows.group(1)}", f'-DLK_ISA_FILE="isa/{isa}.h"', "-c", str(SOURCE / "kernels.cpp"), "-o", str(out)]  # fmt: skip
    subprocess.run(command, check=True, cwd=SOURCE)
    defined = [line.split()[-1] for line in tool("nm", "--defined-only", "--extern-only", str(out)).splitlines() if line]
    assert defined == [f"lk_kernels_{isa}"]


def test_wide_registers_appear_only_in_kernel_code():
    """Outside the kernel tables the extension runs on any processor of its architecture."""
    functions = re.split(r"\n(?=[0-9a-f]+ <)", tool("objdump", "-d", "--no-show-raw-insn", ext.__file__))
    wide = [f.split(">", 1)[0].split("<")[-1] for f in functions if re.search(r"%[yz]mm\d|%k[0-7]\b", f)]
    # Kernel functions live in an unnamed namespace of kernels.cpp: _GLOBAL__N_1 with an Isa, or its plain helpers.
    outside = [name for name in wide if "_GLOBAL__N_1" not in name]
    assert wide and not outside
