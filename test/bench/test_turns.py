"""Versions of the kernels in one program: which are taken, what the table says of one that computes otherwise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "sgl-kernel-ext"


def turns(*words):
    return subprocess.run([sys.executable, str(Path(__file__).with_name("turns")), *map(str, words)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words, said",
    [
        (["a=.", "a=."], "each NAME once"),
        (["before="], "NAME=TREE is needed"),
        (["a-b=."], "of letters"),
        (["a=.", "--shape", "2048"], "two numbers HIDDEN,WIDTH"),
        (["a=.", "--rows", "0"], "must be numbers above 0"),
        (["a=.", "--seconds", "nan"], "must be numbers above 0"),
        (["a=.", "--shape", "2048,²"], "two numbers HIDDEN,WIDTH"),
        (["a=.", "--cpu", "100000"], "this process may use"),
        (["a=nowhere"], "neither a folder with the kernels nor a git revision"),
        (["a=.", "--isa", "mmx"], "a has no instruction set mmx"),
    ],
)
def test_a_wrong_choice_is_one_line(words, said):
    done = turns("--isa", "scalar", *words)
    assert done.returncode == 1 and done.stdout == ""
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_versions_that_do_not_share_the_contract_are_refused(tmp_path):
    shutil.copytree(KERNELS, tmp_path / "other")
    with open(tmp_path / "other" / "kernels.h", "a") as file:
        file.write("// changed\n")
    done = turns("--isa", "scalar", "a=.", f"b={tmp_path / 'other'}")
    assert done.returncode == 1 and "kernels.h differ" in done.stderr


def isas():
    """The smallest that this processor has beyond plain C++, and tiles, which a program has to ask the system for."""
    flags = Path("/proc/cpuinfo").read_text()
    small = "neon" if os.uname().machine == "aarch64" else "avx2" if " avx2 " in flags else "scalar"
    return [small, pytest.param("amx", marks=pytest.mark.skipif(" amx_bf16 " not in flags, reason="no AMX here"))]


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
def test_both_versions_are_measured_and_other_results_are_seen(tmp_path, isa):
    """Compiles one instruction set twice."""
    shutil.copytree(KERNELS, tmp_path / "other")
    epilogue = tmp_path / "other" / "shape" / "epilogue.h"
    was = epilogue.read_text()
    changed = was.replace("F32 y = I::mul(sums[0], I::set1(args.scale));", "F32 y = I::mul(sums[0], I::set1(args.scale * 1.5f));")
    assert changed != was
    epilogue.write_text(changed)
    done = turns("--isa", isa, "now=.", f"other={tmp_path / 'other'}", "--format", "mxfp4", "--rows", 1, "--rows", 9, "--shape", "96,64", "--seconds", 0.01)
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [(row[1], row[2], row[3], row[-1]) for row in table] == [
        (rows, phase, version, "OTHER" if (phase, version) == ("down", "other") else "same")
        for rows in ("1", "9") for phase in ("gate_up", "down") for version in ("now", "other")
    ]  # fmt: skip
    assert all(float(row[4]) > 0 and float(row[6]) > 0 for row in table)
