"""The start, as a program sees it: each test runs a small one with its own environment."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

START = "from sglang.srt.lk.boot import start; start()"


def run(code: str = START, *, path: str = "", **variables: str) -> subprocess.CompletedProcess:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT / 'python'}:{path}", **variables}
    # -S: no site-packages, so that an installed sglang cannot stand in for the source tree.
    return subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True)


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_good_environment_starts_silently():
    done = run(LK_MOE_HYBRID_ENABLED="1", LK_THREADS="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_three_wrong_values_are_one_message_in_under_a_second():
    begin, clock = children_s(), time.monotonic()
    done = run(LK_MOE_HYBRID_ENABLED="1", LK_THREADS="abc", LK_ISA="avx1024", LK_POOL_SLOT="64")
    assert children_s() - begin < 0.5  # of the processor: others' programs do not count
    assert time.monotonic() - clock < 30  # nor does it wait for anything; beside twelve other programs it took 3
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "Hybrid MoE: 3 problems in the environment"
    assert len(lines) == 5 and "Traceback" not in done.stderr
    assert lines[1] == "  LK_POOL_SLOT: unknown variable; did you mean LK_POOL_SLOTS?"


@pytest.mark.parametrize("switch", ["true", "yes", "2", "0x1"])
def test_a_switch_that_is_neither_0_nor_1_stops(switch):
    done = run(LK_MOE_HYBRID_ENABLED=switch)
    assert done.returncode == 2
    assert f"LK_MOE_HYBRID_ENABLED={switch!r}: expected 0 or 1" in done.stderr


def test_the_switch_is_normalised_and_upstreams_binding_is_off():
    names = ["LK_MOE_HYBRID_ENABLED", "SGLANG_AUTO_NUMA_BIND"]
    code = START + f"; import os, json; print(json.dumps([os.environ.get(name) for name in {names}]))"
    assert json.loads(run(code, LK_MOE_HYBRID_ENABLED=" 1 ").stdout) == ["1", "0"]
    assert json.loads(run(code, LK_MOE_HYBRID_ENABLED="1", SGLANG_AUTO_NUMA_BIND="1").stdout) == ["1", "1"]
    assert json.loads(run(code, LK_MOE_HYBRID_ENABLED=" 0 ", LK_THREADS="abc").stdout) == ["0", None]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"SGLANG_USE_CPU_ENGINE": "1"}, "1000"), ({"SGLANG_USE_CPU_ENGINE": "1", "GOMP_SPINCOUNT": "7"}, "7"),
     ({"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "active"}, None), ({}, None)],
    ids=str,
)  # fmt: skip
def test_torchs_threads_let_go_of_the_cores_unless_the_user_says_otherwise(given, expected):
    code = START + "; import os, json; print(json.dumps(os.environ.get('GOMP_SPINCOUNT')))"
    assert json.loads(run(code, LK_MOE_HYBRID_ENABLED="1", **given).stdout) == expected
    assert json.loads(run(code, LK_MOE_HYBRID_ENABLED="0", **given).stdout) == given.get("GOMP_SPINCOUNT")


def test_lines_worth_knowing_are_said_by_the_first_process_only():
    code = START + f"; import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-S', '-c', {START!r}]).returncode)"
    done = run(code, LK_MOE_HYBRID_ENABLED="1", LVLLM_THREADS="2", LK_POOL_LAYERS="0")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "Hybrid MoE: LVLLM_* are legacy names: read LVLLM_THREADS as LK_THREADS",
        "Hybrid MoE: LK_POOL_LAYERS is retired and has no effect: "
        "the pool covers every layer that is not resident; LK_POOL_SLOTS is its switch",
    ]


def test_a_child_with_other_variables_says_its_own_lines():
    child = "import os; os.environ['LK_POOL_LAYERS'] = '0'; " + START
    code = START + f"; import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-S', '-c', {child!r}]).returncode)"
    done = run(code, LK_MOE_HYBRID_ENABLED="1", LK_NUMA_ILP="1")
    said = [line.split(" ")[2] for line in done.stderr.splitlines()]
    assert said == ["LK_NUMA_ILP=1", "LK_NUMA_ILP=1", "LK_POOL_LAYERS"]


def test_everybody_sees_the_configuration_of_the_start():
    change = "; import os; os.environ['LK_THREADS'] = '3'"
    code = START + change + "; from sglang.srt.lk.boot import current; print(current().threads)"
    assert run(code, LK_MOE_HYBRID_ENABLED="1", LK_THREADS="2").stdout == "2\n"


def test_without_a_start_the_configuration_is_read_when_asked_for():
    code = "from sglang.srt.lk.boot import current; print(current().threads)"
    assert run(code, LK_MOE_HYBRID_ENABLED="1", LK_THREADS="2").stdout == "2\n"
    assert "ConfigError" in run(code, LK_MOE_HYBRID_ENABLED="1", LK_THREADS="abc").stderr


def test_the_cpus_of_the_start_are_remembered_when_a_thread_is_pinned_later():
    code = (
        START + "; import os; from sglang.srt.lk.boot import affinity; before = os.sched_getaffinity(0);"
        "os.sched_setaffinity(0, {min(before)}); print(affinity() == before)"
    )
    assert run(code, LK_MOE_HYBRID_ENABLED="1").stdout == "True\n"


EXTENSION = """
def isas():
    return [{"name": n, "supported": n != "avx512_bf16", "missing": []} for n in ("scalar", "avx2", "avx512", "avx512_bf16")]
"""


def test_a_forced_instruction_set_is_checked_against_the_machine(tmp_path):
    (tmp_path / "sgl_kernel_ext.py").write_text(EXTENSION)
    assert run(path=str(tmp_path), LK_MOE_HYBRID_ENABLED="1", LK_ISA="avx2").returncode == 0
    done = run(path=str(tmp_path), LK_MOE_HYBRID_ENABLED="1", LK_ISA="avx512_bf16", LK_THREADS="0")
    assert done.returncode == 2
    assert "LK_ISA=avx512_bf16: this machine runs scalar, avx2, avx512; unset it for the best of them" in done.stderr
    assert "LK_THREADS='0'" in done.stderr


def test_kernels_that_do_not_load_are_said_in_the_same_message(tmp_path):
    (tmp_path / "sgl_kernel_ext.py").write_text("raise ImportError('libfoo.so.1: cannot open shared object file')")
    done = run(path=str(tmp_path), LK_MOE_HYBRID_ENABLED="1", LK_ISA="avx2")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "LK_ISA=avx2 cannot be checked, the kernels do not load: libfoo.so.1" in done.stderr
