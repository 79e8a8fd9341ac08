"""What the compiled extension may contain: one exported name, and instructions above the baseline only in kernels.

``test/processors/test_opcodes.py`` looks at every object of both architectures; this is the file that is installed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess

import opcodes
import pytest
import sgl_kernel_ext as ext


def tool(name: str, *args: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (binutils)")
    return subprocess.run([name, *args], check=True, capture_output=True, text=True).stdout


def test_the_module_exports_nothing_but_its_entry_point():
    symbols = tool("nm", "-D", "--defined-only", ext.__file__)
    names = {line.split()[-1] for line in symbols.splitlines() if line.split()[-2] not in "wVWu"}
    assert names == {"PyInit_sgl_kernel_ext"}


def test_instructions_above_the_baseline_appear_only_in_kernels():
    """Outside the kernel tables the extension runs on any processor of its architecture."""
    # Kernel functions live in an unnamed namespace: _GLOBAL__N_1. The outline atomics of Arm's runtime library ask the
    # system before they use the newer ones.
    inside = ("_GLOBAL__N_1", "__aarch64_")
    higher, outside = 0, []
    for name, instructions in opcodes.functions(tool("objdump", "-d", "--no-show-raw-insn", ext.__file__)):
        found = {opcodes.level(platform.machine(), text) for text in instructions} - {opcodes.BASELINE}
        higher += bool(found)
        if found and not any(part in name for part in inside):
            outside.append((name, found))
    assert higher and not outside
