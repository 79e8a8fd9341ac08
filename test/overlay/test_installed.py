"""The installed fork, as programs see it: off imports nothing of ours, and a host without a driver can serve.

Each test starts a Python of its own, since importing SGLang changes the process.
"""

import ctypes
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
WITHOUT = ("LK_", "LVLLM_", "SGLANG_", "_SGLANG_LK", "PYTHONPATH")


def run(code: str, **variables: str) -> dict:
    """What the program prints as JSON on its last line."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(WITHOUT)} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


OURS = "[m for m in sys.modules if m.startswith(('sglang.srt.lk', 'sgl_kernel_ext', 'sglang_lk'))]"
IMPORTS = f"import json, sys, sglang, sglang.srt.layers.moe.fused_moe_triton.layer; print(json.dumps({OURS}))"
# What a program can learn about a driver: torch, Triton, the CUDA runtime's own words.
DRIVER = """
import json, sys, sglang, torch
from triton.backends.nvidia.driver import CudaDriver
try:
    torch.zeros(1).cuda()
    words = ""
except RuntimeError as error:
    words = str(error)
try:
    import sgl_kernel
    kernel = True
except ImportError:
    kernel = False
facts = dict(
    available=torch.cuda.is_available(), count=torch.cuda.device_count(), words=words, triton=CudaDriver.is_active(),
    stand_in=any("libcuda_absent" in line for line in open("/proc/self/maps")), kernel=kernel,
)
print(json.dumps(facts))
"""
@pytest.mark.parametrize("switch", [None, "0"])
def test_with_the_switch_off_nothing_of_ours_is_imported(switch):
    variables = {} if switch is None else {"LK_MOE_HYBRID_ENABLED": switch}
    assert run(IMPORTS, **variables, LK_THREADS="no number") == []


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def stock() -> dict:
    return run(DRIVER)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_without_a_driver_the_cpu_engine_imports_sgl_kernel_and_sees_no_device(stock, switch):
    engine = run(DRIVER, SGLANG_USE_CPU_ENGINE="1", LK_MOE_HYBRID_ENABLED=switch)
    if has_driver():
        assert engine == stock and not engine["stand_in"]
        return
    assert (stock["stand_in"], stock["kernel"]) == (False, False)
    assert engine == {**stock, "stand_in": True, "kernel": True}
    assert (engine["available"], engine["count"], engine["triton"]) == (False, 0, False)
    assert engine["words"].startswith("Found no NVIDIA driver")


def test_the_stand_in_is_no_driver():
    (path,) = [file for file in metadata.files("sglang-lk") if file.name == "libcuda_absent.so"]
    symbols = subprocess.run(["nm", "-D", "--defined-only", path.locate()], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in symbols.stdout.splitlines()] == ["cuInit", "cuPointerGetAttribute"]
    assert ctypes.CDLL(str(path.locate())).cuInit(0) == 100


def test_the_wheel_carries_all_licences_and_commands():
    found = metadata.distribution("sglang-lk")
    licences = {str(file).split("/licenses/")[1] for file in found.files if "/licenses/" in str(file)}
    assert licences == {"LICENSE", "NOTICE", "python/upstream-LICENSE"}
    assert {entry.name: entry.value for entry in found.entry_points if entry.group == "console_scripts"} == {
        "sglang": "sglang.cli.main:main",
        "killall_sglang": "sglang.cli.killall:main",
        "sglang-lk": "sglang_lk:main",
    }


def test_a_wrong_value_stops_every_command_before_torch_is_imported():
    code = "import sys\ntry:\n import sglang\nexcept SystemExit as e:\n print(e.code, 'torch' in sys.modules)"
    env = {"PATH": os.environ["PATH"], "LK_MOE_HYBRID_ENABLED": "1", "LK_POOL_SLOT": "64"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd="/")
    assert done.stdout == "2 False\n"
    assert "LK_POOL_SLOTS" in done.stderr
