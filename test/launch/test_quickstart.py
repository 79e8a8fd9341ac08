"""The scripts from outside: settings that are wrong, and settings that are named."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import quickstart, server
from launch.environment import ROOT

SCRIPTS = [ROOT / "launch/quickstart.sh", ROOT / "launch/python.sh", ROOT / "test/run.sh", ROOT / ".ci/run"]


def run(tmp_path: Path, **settings: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHON": sys.executable, "LK_VENV": str(tmp_path / "venv")} | settings
    return subprocess.run([ROOT / "launch/quickstart.sh"], env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("port", ["http", "80", "-1", "65535"])
def test_a_wrong_port_is_one_sentence_and_no_traceback(tmp_path, port):
    result = run(tmp_path, QUICKSTART_PORT=port)
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"QUICKSTART_PORT={port} is not a port: give a number from 1024 to 65534, or unset it"
    )


def test_a_taken_port_is_one_sentence_and_nothing_is_made(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = min(listener.getsockname()[1], 65534)
        result = run(tmp_path, QUICKSTART_PORT=str(port))
    assert result.returncode == 1
    assert f"port {port} is taken: set QUICKSTART_PORT to a free one, or unset it" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_compiler_is_one_sentence(tmp_path):
    result = run(tmp_path, CXX="no-such-compiler")
    assert result.returncode == 1
    assert "there is no C++ compiler: apt-get install g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_python_that_is_too_old_is_passed_over(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    script = 'source launch/python.sh; echo "$python"'
    environ = os.environ | {"PYTHON": str(old)}
    result = subprocess.run(["bash", "-c", script], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.strip().startswith("python3")


def test_stock_sees_none_of_our_settings_and_hybrid_all_of_the_users():
    base = {"LK_THREADS": "2", "LVLLM_X": "1", "LK_VENV": "/v", "PATH": "/bin", "PYTHONPATH": "/elsewhere"}
    stock = server.environment(base, hybrid=False, device="cpu")
    hybrid = server.environment(base, hybrid=True, device="cpu")
    assert not [name for name in stock if name.startswith(("LK_", "LVLLM_"))]
    assert {name: hybrid[name] for name in hybrid if name.startswith("LK_")} == {
        "LK_THREADS": "2",
        "LK_MOE_HYBRID_ENABLED": "1",
    }
    assert "PYTHONPATH" not in stock and "PYTHONPATH" not in hybrid


def test_a_gpu_is_left_visible_and_only_the_cpu_chooses_upstreams_cpu_engine():
    cpu, cuda = (server.environment({"PATH": "/bin"}, hybrid=True, device=device) for device in ("cpu", "cuda"))
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1" and cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert "SGLANG_USE_CPU_ENGINE" not in cuda and "CUDA_VISIBLE_DEVICES" not in cuda
    assert set(server.DEVICE_FLAGS) == {"cpu", "cuda"}


def test_the_plan_compares_stock_with_both_encodings():
    assert [(form, hybrid) for _, form, hybrid in quickstart.PLAN] == [("bf16", False), ("bf16", True), ("mxfp4", True)]


def test_the_prompts_are_those_of_the_model_and_some_are_sure():
    prompts = quickstart.load_prompts()
    assert len(prompts) == 40
    assert sum(prompt.sure for prompt in prompts) == 11
    assert len({prompt.text for prompt in prompts}) == 40
    assert {len(prompt.ids) for prompt in prompts} == {48}


def test_every_variable_that_the_scripts_and_their_page_name_exists():
    from sglang.srt.lk.config import KNOWN

    texts = [file.read_text() for file in [*SCRIPTS, *sorted((ROOT / "launch").glob("*.*"))] if file.is_file()]
    named = {name for text in texts for name in re.findall(r"\bLK_[A-Z_]+\b", text)}
    assert "LK_VENV" in named
    assert named - {"LK_VENV"} <= set(KNOWN)
