"""The serving comparison with KTransformers without its server: options, the command line, the files of experts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from peers import serving_kt  # noqa: E402
from peers.cases import Shape  # noqa: E402

SMALL = Shape(256, 128, 6, 2)
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def options(*words):
    return serving_kt.parser().parse_args(["--python", "KT/bin/python", *words])


def stored(file):
    """Header and bytes of a safetensors file, read without the library."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_flags_behind_two_dashes_go_to_the_server_and_batches_have_a_default():
    given = options("--batch", "2", "--batch", "8", "--", "--attention-backend", "triton")
    assert given.flags == ["--attention-backend", "triton"] and given.batch == [2, 8]
    assert serving_kt.batches(options()) == [1, 4]


def test_the_server_gets_kts_flags_and_then_the_users():
    flags = serving_kt.flags(options("--threads", "14", "--method", "FP8", "--", "--kt-num-gpu-experts", "8"), Path("/e"))
    text = " ".join(flags)
    assert "--kt-weight-path /e --kt-method FP8 --kt-cpuinfer 14 --kt-threadpool-count 1 --kt-num-gpu-experts 0" in text
    assert flags[-2:] == ["--kt-num-gpu-experts", "8"]  # of a flag given twice, the last one counts


def test_the_other_environment_inherits_nothing_of_this_one():
    kept = serving_kt.environ({"PYTHONPATH": "a", "PYTHONHOME": "b", "VIRTUAL_ENV": "c", "HOME": "d", "LK_THREADS": "2"})
    assert kept == {"HOME": "d", "LK_THREADS": "2", "LK_MOE_HYBRID_ENABLED": "0"}


@pytest.mark.parametrize("method, names", [
    ("BF16", {"gate_proj.weight": ("BF16", [128, 256]), "down_proj.weight": ("BF16", [256, 128])}),
    ("FP8", {"up_proj.weight": ("F8_E4M3", [128, 256]), "up_proj.weight_scale_inv": ("F32", [1, 2])}),
    ("RAWINT4", {"gate_proj.weight_packed": ("U8", [128, 128]), "down_proj.weight_scale": ("BF16", [256, 4])}),
    ("MXFP4", {"w1.weight": ("U8", [128, 128]), "w2.scale": ("U8", [256, 4])}),
])  # fmt: skip
def test_experts_are_written_as_the_method_reads_them(tmp_path, method, names):
    serving_kt.write_experts(tmp_path / "a.safetensors", method, SMALL)
    header, data = stored(tmp_path / "a.safetensors")
    per_matrix = 1 if method == "BF16" else 2
    assert len(header) == SMALL.experts * 3 * per_matrix
    for name, (dtype, shape) in names.items():
        where = "layers.0.ffn.experts.5." if method == "MXFP4" else "model.layers.0.mlp.experts.5."
        assert (header[where + name]["dtype"], header[where + name]["shape"]) == (dtype, shape)
    end = 0
    for entry in header.values():
        begin, after = entry["data_offsets"]
        assert begin == end and after - begin == np.prod(entry["shape"]) * SIZES[entry["dtype"]]
        end = after
    assert end == len(data)


def test_bytes_are_those_of_the_experts(tmp_path):
    serving_kt.write_experts(tmp_path / "a.safetensors", "BF16", SMALL)
    header, data = stored(tmp_path / "a.safetensors")
    one, again, other = (header[f"model.layers.0.mlp.experts.{index}.up_proj.weight"]["data_offsets"] for index in (1, 1 + serving_kt.DIFFERENT, 2))
    assert data[slice(*one)] == data[slice(*again)] != data[slice(*other)]
    values = (np.frombuffer(data[slice(*one)], np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all() and values.std() > 0


class Fake:
    """A server whose samples take as long as its number of tokens says; it notes when it had the processors."""

    had: list = []

    def __init__(self, config, flags, environ, program=None):
        self.kt, self.flags, self.environ, self.awake = program is not None, flags, environ, True
        self.experts = config.get("quantization_config", {}).get("format")
        Fake.had.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ready(self):
        return 1.0

    def stop(self):
        self.awake = False

    def go_on(self):
        self.awake = True

    def seconds(self, prompts, tokens):
        assert [server.awake for server in Fake.had] == [server is self for server in Fake.had]
        return tokens * (0.3 if self.kt else 0.2)


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    monkeypatch.setattr(Fake, "had", [])
    monkeypatch.setattr(serving_kt.serving, "Server", Fake)
    config = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Fake.had, ["--python", "p", "--model-config", str(tmp_path), "--repeats", "2", "--prompt", "32"]


def test_both_servers_are_measured_by_turns_and_only_one_has_the_processors(fakes, tmp_path, capsys):
    made, words = fakes
    both = ["--threads", "3", "--our-flags=--one 'a b'", "--kt-flags=--two", "--json", str(tmp_path / "out.json"), "--", "--three"]
    assert serving_kt.main([*words, *both]) == 0
    kt, ours = made
    assert kt.kt and not ours.kt
    assert kt.flags[-2:] == ["--three", "--two"] and ours.flags[-3:] == ["--three", "--one", "a b"]
    assert (ours.environ["LK_THREADS"], ours.environ["LK_MOE_HYBRID_ENABLED"]) == ("3", "1")
    out = capsys.readouterr().out
    for case in ("decode, batch 1", "decode, batch 4", "prefill, batch 1"):
        assert f"{case}: KTransformers takes 1.50 times as long (middle half 1.50 to 1.50)" in out
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["what"], row["batch"], row["experts"], round(row["ms"])) for row in rows] == [
        ("decode", 1, "kt BF16", 300), ("decode", 1, "lk bf16", 200), ("decode", 4, "kt BF16", 300), ("decode", 4, "lk bf16", 200),
        ("prefill", 1, "kt BF16", 300), ("prefill", 1, "lk bf16", 200),
    ]  # fmt: skip


def test_ours_has_experts_of_the_same_format_or_is_refused(fakes, capsys):
    made, words = fakes
    assert serving_kt.main([*words, "--method", "MXFP4"]) == 0
    assert [server.experts for server in made] == [None, "mxfp4-pack-quantized"]
    assert serving_kt.main([*words, "--method", "FP8"]) == 2
    said = "serving_kt: --method FP8: ours has no random experts of it (bf16, mxfp4, nvfp4); --alone measures KTransformers\n"
    assert capsys.readouterr().err == said and len(made) == 2
    made.clear()
    assert serving_kt.main([*words, "--method", "FP8", "--alone"]) == 0 and len(made) == 1


def test_a_config_that_says_its_experts_otherwise_is_refused_by_name():
    with pytest.raises(ValueError) as error:
        serving_kt.shape_of({"hidden_size": 8, "num_experts": 4, "num_experts_per_tok": 2}, "gpt")
    assert str(error.value) == "--model-config gpt: no moe_intermediate_size in it"
    assert serving_kt.shape_of({"hidden_size": 8, "moe_intermediate_size": 4, "n_routed_experts": 6, "num_experts_per_tok": 2}, "ds") == Shape(8, 4, 6, 2)


def test_a_python_without_the_packages_is_said_with_the_servers_log(tmp_path, capsys):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho no module named kt_kernel\nexit 1\n")
    fake.chmod(0o755)
    config = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert serving_kt.main(["--alone", "--python", str(fake), "--model-config", str(tmp_path)]) == 2
    assert "no module named kt_kernel" in capsys.readouterr().err
    assert serving_kt.main(["--alone", "--python", str(tmp_path / "none"), "--model-config", str(tmp_path)]) == 2
    assert "none" in capsys.readouterr().err


FAKES = {
    "kt_kernel/__init__.py": "",
    "kt_kernel/utils/__init__.py": "",
    "kt_kernel/utils/loader.py": """
class BF16SafeTensorLoader:
    def load_experts(self, base_key, device="cpu"):
        return f"{base_key} to {device}"

class SafeTensorLoader(BF16SafeTensorLoader): ...
""",
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": "prepare_server_args = ' '.join\n",
    "sglang/scheduler.py": """
import importlib.util
def run(flags):
    from kt_kernel.utils.loader import BF16SafeTensorLoader as kind
    print(flags, "|", kind().load_experts("model.layers.17", device="gpu"), "|", importlib.util.find_spec("formats"), flush=True)
""",
    "sglang/launch_server.py": """
import multiprocessing
from sglang.scheduler import run
def run_server(flags):
    child = multiprocessing.get_context("spawn").Process(target=run, args=(flags,))
    child.start()
    child.join()
""",
}


def test_every_process_of_the_server_reads_layer_0_and_no_module_of_this_folder(tmp_path):
    for name, text in FAKES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("formats", "formats"))
    program = Path(serving_kt.__file__).parent / "kt_server.py"
    done = subprocess.run([sys.executable, str(program), "--port", "1"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.stdout, done.returncode) == ("--port 1 | model.layers.0 to gpu | None\n", 0), done.stderr
