"""A checkpoint that is not whole never serves: one message names what is wrong, no traceback, no process stays.

Most cases are starts of an in-process engine, whose scheduler, loader and signals are those of a server; one is a real
``sglang serve``. What each message says in detail is ``test/lk/test_loading.py``'s business.
"""

import json
import os
import shutil
import sys
import time

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.serve

from engines import Host  # noqa: E402
from recite_server import FLAGS  # noqa: E402

from launch import processes  # noqa: E402

EXPERTS = "model.layers.2.mlp.experts"
SCALE = f"{EXPERTS}.5.up_proj.weight_scale"


def without_an_expert(folder):
    change(folder, lambda tensors: tensors.pop(f"{EXPERTS}.9.down_proj.weight_packed"))


def with_a_nan_scale(folder):
    change(folder, lambda tensors: tensors[SCALE].view(-1)[7:8].fill_(255))


def with_a_wrong_shape(folder):
    change(folder, lambda tensors: tensors.update({SCALE: tensors[SCALE][:-1].clone()}))


def with_integers(folder):
    change(folder, lambda tensors: tensors.update({SCALE: tensors[SCALE].to(torch.int32)}))


def cut_off(folder):
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def without_a_shard(folder):
    tensors = safetensors.load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors.save_file({n: tensors[n] for n in names[::2]}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()


def in_int8(folder):
    """No file is wrong, only the format: 8-bit integers of compressed-tensors."""
    config = json.loads((folder / "config.json").read_text())
    quantized = config["quantization_config"]
    group = next(iter(quantized["config_groups"].values()))
    group["weights"] |= {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}
    group["format"] = quantized["format"] = "pack-quantized"
    (folder / "config.json").write_text(json.dumps(config))


def change(folder, edit):
    file = folder / "model.safetensors"
    tensors = safetensors.load_file(file)
    edit(tensors)
    safetensors.save_file(tensors, file, {"format": "pt"})


CASES = {
    without_an_expert: f"{EXPERTS}: the checkpoint has no expert 9 down codes",
    with_a_nan_scale: f"{EXPERTS}: expert 5, up, scales: 1 of 1024 scales are not valid numbers",
    with_a_wrong_shape: f"{EXPERTS}: expert 5, up, scales: the shape is [127, 8]; expected [128, 8] (tensor {SCALE} in model.safetensors)",
    with_integers: f"{EXPERTS}: expert 5, up, scales: the type is int32; expected uint8",
    cut_off: "model.safetensors has",
    without_a_shard: "model-00002-of-00002.safetensors",
    in_int8: "compressed-tensors integers of 8 bits are not supported (4 bits are)",
}


@pytest.fixture
def damaged(recite, tmp_path):
    def make(damage):
        folder = tmp_path / damage.__name__
        shutil.copytree(recite["mxfp4"], folder)
        damage(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def host():
    with Host({"LK_MOE_HYBRID_ENABLED": "1"}) as running:
        yield running


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_an_engine_refuses_it_in_one_message(host, damaged, damage, tmp_path):
    log = tmp_path / "log"
    answer = host.run(damaged(damage), [], log, dtype="float32")
    said = log.read_text()
    assert CASES[damage] in answer["error"]
    assert "Traceback" not in said
    assert said.count("Hybrid MoE: ") == 1


def test_a_server_ends_with_the_message_and_all_its_processes(damaged, tmp_path):
    command = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve", "--model-path", str(damaged(with_a_nan_scale))]
    environ = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "LK_MOE_HYBRID_ENABLED": "1"}
    process = processes.start([*command, *FLAGS, "--port", "30999"], log=tmp_path / "log", environ=environ, folder=tmp_path)
    seen = set()
    try:
        deadline = time.monotonic() + 900
        while process.poll() is None and time.monotonic() < deadline:
            seen |= processes.descendants(process.pid)
            time.sleep(0.2)
    finally:
        processes.end_tree(process)
    said = (tmp_path / "log").read_text(errors="replace")
    assert process.returncode not in (0, None)
    assert CASES[with_a_nan_scale] in said and "Traceback" not in said
    assert len(said[said.index(CASES[with_a_nan_scale]) :].splitlines()) <= 4
    # The launcher kills its children and ends without waiting for them: the kernel takes their memory back meanwhile.
    deadline = time.monotonic() + 30
    while seen & processes.parents().keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen and not seen & processes.parents().keys()
