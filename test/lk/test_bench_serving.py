"""Models without weights for ``bench decode`` and ``bench prefill``: their shapes, and what is made of the options."""

import http.client
import json
import os
import re
import sys

import pytest

from sglang.srt.lk import cli
from sglang.srt.lk.bench import serving

SHAPES = {  # hidden, layers, experts, experts per token, expert width
    "deepseek-v3": (7168, 61, 256, 8, 2048),
    "deepseek-v4-flash": (4096, 43, 256, 6, 2048),
    "glm-4.7-flash": (2048, 47, 64, 4, 1536),
    "gpt-oss-120b": (2880, 36, 128, 4, 2880),
    "qwen3-30b-a3b": (2048, 48, 128, 8, 768),
    "qwen3-next-80b-a3b": (2048, 48, 512, 10, 512),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shipped_shape_is_the_models(name):
    c = serving.config_of(name, experts=None, layers=None)
    experts = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts")
    found = c["hidden_size"], c["num_hidden_layers"], experts, c["num_experts_per_tok"], c.get("moe_intermediate_size") or c["intermediate_size"]
    assert found == SHAPES[name]


def test_every_shipped_file_has_its_test():
    assert serving.known() == sorted(SHAPES)


def test_a_path_will_do_as_well_as_a_name(tmp_path):
    small = {"num_hidden_layers": 3, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert serving.config_of(str(tmp_path), experts=None, layers=None) == small
    assert serving.config_of(str(tmp_path / "config.json"), experts=None, layers=2) == {**small, "num_hidden_layers": 2}


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_a_multimodal_model_is_its_text_model(tmp_path, key):
    text = {"num_hidden_layers": 3, "vocab_size": 11, "layer_types": ["a", "b", "c"]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], key: text}))
    c = serving.config_of(str(tmp_path), experts="mxfp4", layers=1)
    assert c[key] == {"num_hidden_layers": 1, "vocab_size": 11, "layer_types": ["a"]} and "quantization_config" in c
    (tmp_path / "config.json").write_text(json.dumps({key: {**text, "quantization_config": {}}}))
    with pytest.raises(ValueError, match="says itself how its experts are written"):
        serving.config_of(str(tmp_path), experts="mxfp4", layers=None)


@pytest.mark.parametrize("content, said", [
    ("", "it is not JSON (Expecting value: line 1 column 1 (char 0))"),
    ("é", "it is not JSON ("),
    ("[" * 200000, "it is not JSON ("),
    ("[]", "it is not a JSON object"),
    ("{}", "vocab_size is null; a whole number from 11 is needed"),
    ('{"vocab_size": 10, "num_hidden_layers": 3}', "vocab_size is 10; a whole number from 11 is needed"),
    ('{"vocab_size": true, "num_hidden_layers": 3}', "vocab_size is true; a whole number from 11 is needed"),
    ('{"vocab_size": 99, "num_hidden_layers": "3"}', 'num_hidden_layers is "3"; a whole number from 1 is needed'),
    ('{"vocab_size": 99, "num_hidden_layers": 3, "text_config": {"vocab_size": 99}}', "num_hidden_layers is null; a whole number"),
])  # fmt: skip
def test_a_config_that_is_none_is_one_message_with_its_file_and_no_server(tmp_path, capsys, monkeypatch, content, said):
    monkeypatch.setattr(serving, "Server", lambda *_: pytest.fail("a server was started"))
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert cli.main(["bench", "decode", "--model-config", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"sglang-lk: --model-config {tmp_path}/config.json: {said}")


@pytest.mark.parametrize("command, options, said", [
    ("decode", ["--tokens", "0", "--prompt", "0"], "--prompt 0: at least 1; --tokens 0: at least 1"),
    ("decode", ["--batch", "4", "--batch", "0", "--batch", "-1"], "--batch 0: at least 1; --batch -1: at least 1"),
    ("prefill", ["--prompt", "-5", "--repeats", "1"], "--prompt -5: at least 1; --repeats 1: at least 2"),
])  # fmt: skip
def test_numbers_that_are_too_small_are_refused_by_name_and_no_server_is_started(capsys, monkeypatch, command, options, said):
    monkeypatch.setattr(serving, "Server", lambda *_: pytest.fail("a server was started"))
    assert cli.main(["bench", command, "--model-config", "qwen3-30b-a3b", *options]) == 2
    assert capsys.readouterr().err == f"sglang-lk: {said}\n"


@pytest.mark.parametrize("options, said", [
    (["--hidden", "15", "--rows", "0"], "--hidden 15: at least 16; --rows 0: at least 1"),
    (["--layers", "0", "--samples", "1"], "--layers 0: at least 1; --samples 1: at least 2"),
])  # fmt: skip
def test_so_they_are_for_the_hand_over(capsys, options, said):
    assert cli.main(["bench", "handover", *options]) == 2
    assert capsys.readouterr().err == f"sglang-lk: {said}\n"


def test_fewer_layers_shorten_what_is_listed_per_layer():
    c = serving.config_of("gpt-oss-120b", experts=None, layers=4)
    assert c["num_hidden_layers"] == len(c["layer_types"]) == 4


@pytest.mark.parametrize("experts, form", [("mxfp4", "mxfp4-pack-quantized"), ("nvfp4", "nvfp4-pack-quantized")])
def test_experts_can_be_written_in_four_bits(experts, form):
    c = serving.config_of("qwen3-30b-a3b", experts=experts, layers=None)
    assert c["quantization_config"]["format"] == form and "lm_head" in c["quantization_config"]["ignore"]


def test_only_routed_experts_are_written_in_four_bits():
    """Layer 0 of GLM-4.7-Flash is dense, and its matrices have the experts' names."""
    ignore = serving.config_of("glm-4.7-flash", experts="mxfp4", layers=None)["quantization_config"]["ignore"]
    patterns = [entry.removeprefix("re:") for entry in ignore if entry.startswith("re:")]
    ignored = lambda name: any(re.match(pattern, name) for pattern in patterns)
    layer = "model.layers.0."
    for name in ("mlp.gate_up_proj", "mlp.down_proj", "mlp.up_proj", "mlp.gate", "self_attn.o_proj", "mlp.shared_experts.up_proj"):
        assert ignored(layer + name), name
    for name in ("mlp.experts", "mlp.experts.0.gate_proj", "mlp.experts.7.down_proj"):
        assert not ignored(layer + name), name


@pytest.mark.parametrize("call, text", [
    (dict(name="qwen4", experts=None, layers=None), "neither a file nor one of deepseek-v3, deepseek-v4-flash"),
    (dict(name="qwen3-30b-a3b", experts=None, layers=49), "the model has 48"),
    (dict(name="deepseek-v3", experts="mxfp4", layers=None), "says itself how its experts are written"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused(call, text):
    with pytest.raises(ValueError) as error:
        serving.config_of(**call)
    assert text in str(error.value)


def test_flags_behind_two_dashes_go_to_the_server():
    arguments = cli.parser().parse_args(["bench", "decode", "--model-config", "qwen3-30b-a3b", "--batch", "1", "--", "--device", "cpu"])
    assert arguments.flags == ["--device", "cpu"] and arguments.batch == [1] and arguments.what == "decode"


def test_prompts_are_the_same_in_every_run_and_differ_within_one():
    first = serving.random_prompts(3, 5, 1000, seed=1)
    assert first == serving.random_prompts(3, 5, 1000, seed=1) and len({tuple(p) for p in first}) == 3
    assert all(10 <= token < 1000 for prompt in first for token in prompt)


class Slow:
    """A server whose answers take 0.5 s and 0.1 s a token."""

    def seconds(self, prompts, tokens):
        return 0.5 + 0.1 * tokens


def test_a_decode_step_is_what_a_longer_answer_takes_more():
    found = serving.several(serving.decode_step, Slow(), batch=2, prompt=4, tokens=16, repeats=3, vocabulary=1000)
    assert found == pytest.approx([0.1] * 3)
    assert serving.several(serving.prefill_once, Slow(), batch=1, prompt=4, repeats=2, vocabulary=1000) == pytest.approx([0.6] * 2)


@pytest.fixture
def server(tmp_path):
    """One that was not started; its log says why."""
    made = serving.Server.__new__(serving.Server)
    made.log, made.port = tmp_path / "log", 1
    made.log.write_text("the reason\n")
    return made


def test_a_server_that_dies_while_it_is_asked_has_failed_with_its_log(server, monkeypatch):
    for error in (http.client.RemoteDisconnected("gone"), ConnectionResetError("gone"), TimeoutError("gone")):
        def ask(*_, error=error):
            raise error

        monkeypatch.setattr(server, "_ask", ask)
        with pytest.raises(serving.ServerFailed) as caught:
            server.seconds([[1]], 2)
        assert str(caught.value) == f"the server did not answer ({error!r}); its log ends:\nthe reason\n"


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"error": 1}', b"[1]", b'[{"output_ids": [1]}]'])
def test_what_is_no_answer_of_so_many_tokens_is_a_failure_too(server, monkeypatch, data):
    monkeypatch.setattr(server, "_ask", lambda *_: (200, data))
    with pytest.raises(serving.ServerFailed) as caught:
        server.seconds([[1]], 2)
    assert str(caught.value) == f"the server answered with status 200: {data!r}; its log ends:\nthe reason\n"


def test_only_lines_about_hybrid_moe_are_repeated(tmp_path):
    server = serving.Server.__new__(serving.Server)
    server.log = tmp_path / "log"
    server.log.write_text("start\n  indented\nHybrid MoE: 2 MoE layers\n  model role\n  main cpu\nother\n  indented\n")
    assert server.says() == ["Hybrid MoE: 2 MoE layers", "  model role", "  main cpu"]


def test_another_sglang_is_started_with_the_same_flags(tmp_path):
    said = tmp_path / "said"
    script = f"import json, sys; json.dump(sys.argv[1:], open({str(said)!r}, 'w'))"
    with serving.Server({"vocab_size": 9}, ["--one", "2"], os.environ, program=[sys.executable, "-c", script]) as server:
        with pytest.raises(serving.ServerFailed):
            server.ready()
    words = json.loads(said.read_text())
    assert words[0] == "--model-path" and words[2:4] == ["--load-format", "dummy"] and words[-2:] == ["--one", "2"]
    assert words[words.index("--port") + 1] == str(server.port)


def test_a_row_has_the_middle_of_its_times_and_the_spread_of_its_middle_half():
    row = serving.row("decode", "m", "bf16", batch=2, prompt=4, times=[0.1, 0.2, 0.2, 0.3], work=2)
    assert (row.ms, row.tokens_per_s) == pytest.approx((200, 10)) and row.spread == pytest.approx(0.75)


@pytest.mark.parametrize("failure, status, said", [
    (serving.ServerFailed("the server did not answer"), 1, "the server did not answer"),
    (KeyboardInterrupt(), 130, "stopped"),
])  # fmt: skip
@pytest.mark.parametrize("batches, measured", [((1, 4), [1]), ((4, 1), "before")])
def test_rows_from_before_a_failure_are_stored_and_without_any_the_file_is_kept(tmp_path, capsys, monkeypatch, failure, status, said, batches, measured):
    class Dying(Slow):
        """It comes up, and fails at a batch of four."""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ready(self):
            return 1.0

        def says(self):
            return []

        def seconds(self, prompts, tokens):
            if len(prompts) == 4:
                raise failure
            return super().seconds(prompts, tokens)

    monkeypatch.setattr(serving, "Server", lambda *_: Dying())
    file = tmp_path / "a.json"
    file.write_text('"before"')
    options = [option for batch in batches for option in ("--batch", str(batch))]
    assert cli.main(["bench", "decode", "--model-config", "qwen3-30b-a3b", *options, "--json", str(file)]) == status
    out, err = capsys.readouterr()
    stored = json.loads(file.read_text())
    assert err.strip() == f"sglang-lk: {said}"
    assert (stored if measured == "before" else [row["batch"] for row in stored]) == measured
    assert ("100.00" in out) == (measured == [1])
