"""The self-check passes on every processor that can be had here: this one, emulated ones, and under sanitizers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import count_instructions
import pytest
from builds import HERE, PLAIN, SANITIZED, Build, need

pytestmark = pytest.mark.processors
X86 = pytest.mark.skipif(HERE != "x86_64", reason="needs an x86-64 machine")


def assert_passed(done) -> None:
    closing = re.search(r"^(\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert closing and int(closing[1]) > 100 and closing[2] == "0"


def test_every_kernel_passes_on_this_processor():
    assert_passed(PLAIN[HERE].run())


@pytest.mark.parametrize("build", SANITIZED, ids=lambda build: build.name)
def test_every_kernel_passes_under_the_sanitizer(build: Build):
    """Address and undefined behaviour, then data races. Buffers end at guard pages in these builds as well."""
    assert_passed(build.run())


# Which table a model must get. Armv8.0 to 8.2 without bf16, then everything qemu has.
ARM_MODELS = {"cortex-a53": "neon", "cortex-a72": "neon", "neoverse-n1": "neon", "a64fx": "neon", "max": "neon_bf16"}
# From 2003 on. This qemu has no AVX-512, so newer models fall back; the last three lack one thing each, the last of
# all a system that saves wide registers.
X86_MODELS = {
    "Opteron_G1": "scalar", "Nehalem": "scalar", "SandyBridge": "scalar", "Haswell": "avx2", "EPYC": "avx2",
    "Skylake-Server": "avx2", "max": "avx2", "max,-fma": "scalar", "max,-avx2": "scalar", "max,-xsave": "scalar",
}  # fmt: skip
MODELS = [("aarch64", *row) for row in ARM_MODELS.items()] + [("x86_64", *row) for row in X86_MODELS.items() if HERE == "x86_64"]


@pytest.mark.parametrize("machine, cpu, isa", MODELS)
def test_a_model_gets_the_best_table_that_it_can_run(machine, cpu, isa):
    done = PLAIN[machine].run("--list", "--expect", isa, cpu=cpu)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^  {isa} +chosen$", done.stdout, re.MULTILINE)


def test_every_kernel_passes_on_an_arm_processor_with_bf16():
    assert_passed(PLAIN["aarch64"].run(cpu="max"))


def test_the_neon_kernels_pass_on_the_first_armv8():
    assert_passed(PLAIN["aarch64"].run("--isa", "neon", cpu="cortex-a72"))


@X86
@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell"])
def test_the_kernels_pass_on_an_old_x86_processor(cpu):
    """Without binary16: this qemu loses its subnormals where VCVTPH2PS runs with DAZ set, the processor does not."""
    assert_passed(PLAIN["x86_64"].run("--no-half", "--format", "bf16", "--format", "mxfp4", "--format", "int4_group32", cpu=cpu))


@pytest.mark.parametrize("machine, cpu, isa, lacks", [
    ("aarch64", "neoverse-n1", "neon_bf16", "bf16"),
    pytest.param("x86_64", "Haswell", "avx512", "avx512f, avx512bw", marks=X86),
    pytest.param("x86_64", "Nehalem", "avx2", "avx2, fma, f16c", marks=X86),
])  # fmt: skip
def test_an_instruction_set_that_the_model_lacks_is_an_error_when_forced(machine, cpu, isa, lacks):
    done = PLAIN[machine].run("--isa", isa, cpu=cpu)
    assert done.returncode == 2
    assert f"instruction set {isa} is not supported by this processor (it lacks {lacks}" in done.stderr


def test_bfdot_and_bfmmla_compute_what_the_page_says(tmp_path):
    build, source, program = PLAIN["aarch64"], Path(__file__).with_name("bfdot.cpp"), tmp_path / "bfdot"
    need(build.tool("g++"), "g++-aarch64-linux-gnu")
    flags = ["-O2", "-std=c++20", "-march=armv8.2-a+bf16", "-ffp-contract=off"]
    subprocess.run([build.tool("g++"), *flags, str(source), "-o", str(program)], check=True)
    assert build.execute(program, cpu="max").stdout == "800000 compared, 0 different\n"


def test_instructions_are_counted_and_decoding_is_shared_by_rows(tmp_path):
    """Limits with room to spare: a kernel that spills its registers or decodes for every row is far beyond them."""
    library = count_instructions.plugin(tmp_path)
    one, many = (count_instructions.per_byte(PLAIN["aarch64"], library, "neon_bf16", "mxfp4", rows) / rows for rows in (1, 64))
    assert 0.5 < one < 3 and many < one / 2


def test_an_unknown_argument_and_a_missed_expectation_are_failures():
    assert "known are --isa NAME" in PLAIN[HERE].run("--fast").stderr
    done = PLAIN[HERE].run("--list", "--expect", "avx1024")
    assert done.returncode == 1 and "avx1024 was expected" in done.stdout
