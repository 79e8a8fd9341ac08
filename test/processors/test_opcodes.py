"""No instruction above the baseline outside the kernel tables, and in a table none above its own; per architecture."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import opcodes
import pytest
from builds import PLAIN, ROWS, Build, need

pytestmark = pytest.mark.processors
BUILDS = pytest.mark.parametrize("build", PLAIN.values(), ids=PLAIN.keys())


def read(build: Build, tool: str, *args: str) -> str:
    need(build.tool(tool), "binutils" if build.tool(tool) == tool else "binutils-aarch64-linux-gnu")
    return subprocess.run([build.tool(tool), *args], check=True, capture_output=True, text=True).stdout


def levels(build: Build, path: Path) -> dict[str, set[str]]:
    """What the object asks for: level -> examples."""
    found = defaultdict(set)
    for name, instructions in opcodes.functions(read(build, "objdump", "-d", "--no-show-raw-insn", str(path))):
        for instruction in instructions:
            found[opcodes.level(build.machine, instruction)].add(f"{name}: {instruction}")
    return found


@BUILDS
def test_code_outside_the_kernel_tables_runs_on_any_processor(build):
    objects = build.core_objects()
    assert len(objects) >= 8
    for path in objects:
        found = levels(build, path)
        assert found.pop(opcodes.BASELINE)
        assert not found, path.name


@BUILDS
def test_a_kernel_table_uses_its_own_instructions_and_no_later_ones(build):
    objects = build.isa_objects()
    assert len(objects) >= 3 and set(ROWS) <= set(opcodes.ALLOWED)
    for isa, path in objects.items():
        found, allowed = levels(build, path), opcodes.ALLOWED[isa]
        assert found.pop(opcodes.BASELINE)
        assert not {level: sorted(found[level])[:3] for level in set(found) - allowed}, isa
        assert isa in found or isa not in allowed, f"{isa} never uses its own instructions"


@BUILDS
def test_a_kernel_table_exports_one_symbol(build):
    """A weak template symbol built for one instruction set could be picked by the linker for everyone."""
    for isa, path in build.isa_objects().items():
        listed = read(build, "nm", "--defined-only", "--extern-only", str(path))
        assert [line.split()[-1] for line in listed.splitlines() if line] == [f"lk_kernels_{isa}"]


@pytest.mark.parametrize("machine, instruction, level", [
    ("x86_64", "vpermb %zmm1,%zmm2,%zmm3", "avx512_vbmi"), ("x86_64", "vpermi2b %zmm1,%zmm2,%zmm3", "avx512_vbmi"), ("x86_64", "vaddps %ymm1,%ymm2,%ymm3", "avx2"),
    ("x86_64", "vaddps %xmm16,%xmm2,%xmm3", "avx512"), ("x86_64", "vmovss (%rax),%xmm0", "avx2"),
    ("x86_64", "pshufb %xmm1,%xmm2", "sse4"), ("x86_64", "shlx %eax,%ebx,%ecx", "bmi"), ("x86_64", "addps %xmm1,%xmm2", "baseline"),
    ("x86_64", "vdpbf16ps %zmm1,%zmm2,%zmm3", "avx512_bf16"), ("x86_64", "tdpbf16ps %tmm0,%tmm1,%tmm2", "amx"),
    ("x86_64", "punpcklbw %xmm1,%xmm2", "baseline"), ("x86_64", "pminub %xmm1,%xmm2", "baseline"), ("x86_64", "pmaxsw %xmm1,%xmm2", "baseline"),
    ("aarch64", "bfdot\tv1.4s, v2.8h, v3.8h", "neon_bf16"), ("aarch64", "ldaddal\tw1, w2, [x0]", "lse"),
    ("aarch64", "fmla\tv1.4s, v2.4s, v3.4s", "baseline"), ("aarch64", "fmla\tv1.8h, v2.8h, v3.8h", "fp16"),
    ("aarch64", "fcvtl\tv0.4s, v1.4h", "baseline"), ("aarch64", "fcvt\ts0, h0", "baseline"), ("aarch64", "add\tz0.s, z1.s, z2.s", "sve"),
    ("aarch64", "ldr\tx0, [x1]", "baseline"), ("aarch64", "paciasp", "later"), ("aarch64", "stadd\tw1, [x0]", "lse"),
])  # fmt: skip
def test_an_instruction_is_given_the_right_level(machine, instruction, level):
    assert opcodes.level(machine, instruction) == level
