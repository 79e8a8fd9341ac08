"""The tutorial is run as it is printed, and says what it shows: only the port is changed, and building is left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from pages import ROOT, blocks

TUTORIAL = ROOT / "docs/tutorials/first-model.md"
PROMPT = "And the children of Reuben,"


def script(port: int) -> str:
    steps = [block.text for block in blocks(TUTORIAL, "bash") if "quickstart.sh" not in block.text]
    return "\n".join(steps).replace("30100", str(port))


@pytest.fixture
def folder(tmp_path):
    """The project's folder as the quick start leaves it."""
    sys.path.insert(0, str(ROOT))
    from launch import recite

    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "build/quickstart").mkdir(parents=True)
    recite.make("mxfp4", tmp_path / "build/quickstart/recite-mxfp4")
    return tmp_path


@pytest.mark.upstream
@pytest.mark.serve
@pytest.mark.slow
def test_the_tutorial_runs_and_both_instruction_sets_give_the_expected_text(folder):
    from launch import machine, processes

    mine = {name: value for name, value in os.environ.items() if not name.startswith(("LK_", "LVLLM_", "SGLANG_", "_SGLANG_LK"))}
    port = machine.free_ports(1)[0]
    run = subprocess.Popen(
        ["bash", "-c", script(port)], cwd=folder, env=mine, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = run.communicate(timeout=1800)
    finally:
        processes.end_tree(run)
    log = (folder / "build/server.log").read_text()
    expected = next(entry for entry in json.loads((ROOT / "launch/models/recite-moe/expected.json").read_text()) if entry["prompt"] == PROMPT)
    answers = [json.loads(f'"{text}"') for text in re.findall(r'^"text":"([^"]*)"$', out, re.MULTILINE)]
    assert len(answers) == 2, out + err + log[-3000:]
    assert answers[0] == answers[1]
    assert answers[0] and expected["text"].startswith(answers[0])
    assert "Hybrid MoE: 4 MoE layers: 4 cpu" in out
    assert "avx2 kernels" in log
    assert "LK_ISA='avx1024': expected scalar" in err
