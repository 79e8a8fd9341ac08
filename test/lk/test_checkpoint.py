"""What the planner reads from names and headers, for every spelling of experts that it knows."""

import json

import headers
import pytest
from headers import E, H, I
from sglang.srt.lk import checkpoint


def packed(scale, group, kind="weight_packed", scale_kind="weight_scale", codes="U8", **where):
    return headers.per_expert(
        {kind: lambda r, c: (codes, (r, c // 2)), scale_kind: lambda r, c: (scale, (r, c // group))}, **where
    )


MIXTRAL = {"prefix": "model.layers.{}.block_sparse_moe.experts.", "names": ("w1", "w3", "w2")}
DEEPSEEK = {"prefix": "layers.{}.ffn.experts.", "names": ("w1", "w3", "w2")}
STACKED = "model.layers.{}.mlp.experts."


def stacked(tensors):
    return {STACKED.format(layer) + name: tensor for layer in (0, 1) for name, tensor in tensors.items()}


SPELLINGS = {
    "bf16": ("bf16", headers.bf16()),
    "bf16 as w1, w2, w3": ("bf16", headers.bf16(**MIXTRAL)),
    "f16": ("f16", headers.per_expert({"weight": lambda r, c: ("F16", (r, c))})),
    "bf16 stacked": ("bf16", stacked({"gate_up_proj": ("BF16", (E, 2 * I, H)), "down_proj": ("BF16", (E, H, I))})),
    "bf16 stacked the other way": (
        "bf16",
        stacked({"gate_up_proj": ("BF16", (E, H, 2 * I)), "down_proj": ("BF16", (E, I, H))}),
    ),
    "mxfp4 of compressed-tensors": ("mxfp4", headers.mxfp4()),
    "mxfp4 of DeepSeek": ("mxfp4", packed("F8_E8M0", 32, "weight", "scale", "I8", **DEEPSEEK)),
    "mxfp4 stacked in blocks": (
        "mxfp4",
        stacked(
            {
                "gate_up_proj_blocks": ("U8", (E, 2 * I, H // 32, 16)),
                "gate_up_proj_scales": ("U8", (E, 2 * I, H // 32)),
                "gate_up_proj_bias": ("BF16", (E, 2 * I)),
                "down_proj_blocks": ("U8", (E, H, I // 32, 16)),
                "down_proj_scales": ("U8", (E, H, I // 32)),
                "down_proj_bias": ("BF16", (E, H)),
            }
        ),
    ),
    "nvfp4 of compressed-tensors": ("nvfp4", packed("F8_E4M3", 16)),
    "nvfp4 of ModelOpt": ("nvfp4", packed("F8_E4M3", 16, "weight")),
    "fp8 in blocks": (
        "fp8",
        headers.per_expert({"weight": lambda r, c: ("F8_E4M3", (r, c)), "weight_scale_inv": lambda r, c: ("F32", (1, 1))}),
    ),
    "mxfp8": (
        "mxfp8",
        headers.per_expert({"weight": lambda r, c: ("F8_E4M3", (r, c)), "weight_scale": lambda r, c: ("U8", (r, c // 32))}),
    ),
    "int4 of AWQ": (
        "int4",
        headers.per_expert({"qweight": lambda r, c: ("I32", (c, r // 8)), "scales": lambda r, c: ("F16", (1, r))}),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_experts_is_recognised(tmp_path, spelling):
    fmt, tensors = SPELLINGS[spelling]
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", tensors))
    assert found.problems == []
    assert [(x.layer_id, x.draft, x.format, x.experts, x.hidden, x.width, x.missing) for x in found.layers] == [
        (0, None, fmt, E, H, I, ()),
        (1, None, fmt, E, H, I, ()),
    ]
    assert found.other_bytes == 100 * H * 2


def test_bytes_of_experts_are_those_of_their_tensors(tmp_path):
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", headers.mxfp4()))
    assert found.layers[0].bytes == E * 3 * H * I * 17 // 32


def test_shared_experts_and_routers_are_no_routed_experts(tmp_path):
    more = {
        f"model.layers.0.mlp.{name}.weight": ("BF16", (2, H))
        for name in ("gate", "shared_expert.gate_proj", "shared_experts.up_proj")
    }
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", {**headers.bf16(), **more}))
    assert len(found.layers) == 2
    assert found.other_bytes == (100 + 3 * 2) * H * 2


def test_draft_layers_are_told_from_the_main_model(tmp_path):
    tensors = {
        **headers.mxfp4(),
        **headers.bf16(layers=(0,), prefix="mtp.layers.{}.mlp.experts."),
        **headers.bf16(layers=(2,)),
        **headers.bf16(layers=(1,), prefix="stages.{}.ffn.experts."),
    }
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", tensors))
    assert [(x.draft, x.layer_id, x.format) for x in found.layers] == [
        (None, 0, "mxfp4"),
        (None, 1, "mxfp4"),
        ("dspark", 1, "bf16"),
        ("mtp", 0, "bf16"),
        ("mtp", 2, "bf16"),
    ]


def test_layers_may_differ_in_format_and_a_mixed_layer_says_so(tmp_path):
    tensors = {**headers.mxfp4(layers=(0,)), **headers.bf16(layers=(1,))}
    tensors["model.layers.1.mlp.experts.0.up_proj.weight"] = ("F16", (I, H))
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", tensors))
    assert [x.format for x in found.layers] == ["mxfp4", "mixed: bf16, f16"]


def test_missing_expert_tensors_are_named(tmp_path):
    tensors = headers.mxfp4()
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight_packed"]
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", tensors))
    assert [x.missing for x in found.layers] == [(), ("experts.3.down",)]


def test_a_nested_text_model_is_read(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16(prefix="model.language_model.layers.{}.mlp.experts."))
    nested = {key: headers.CONFIG[key] for key in headers.CONFIG if key != "architectures"}
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["X"], "text_config": {**nested, "num_experts_per_tok": 3}})
    )
    found = checkpoint.read(folder)
    assert (found.architecture, found.top_k, found.declared_experts, len(found.layers)) == ("X", 3, E, 2)


def test_shards_are_read_with_and_without_an_index_and_one_may_be_missing(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16(layers=(0,)))
    headers.write_file(folder / "more.safetensors", headers.bf16(layers=(1,)))
    assert [x.layer_id for x in checkpoint.read(folder).layers] == [0, 1]
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors", "c": "lost.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = checkpoint.read(folder)
    assert [x.layer_id for x in found.layers] == [0, 1]
    assert found.problems == ["1 of 3 shards in the index are missing: lost.safetensors"]


@pytest.mark.parametrize("cut, said", [(1, "it is cut off"), (-3, "something was appended")])
def test_a_file_of_the_wrong_length_is_named(tmp_path, cut, said):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-cut] if cut > 0 else data + bytes(-cut))
    (problem,) = checkpoint.read(folder).problems
    assert problem == f"model.safetensors has {len(data) - cut} bytes instead of {len(data)}: {said}"


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "cut off in its header"),
        (b"\xff" * 64, "cut off in its header"),
        (b"\x02" + bytes(7) + b"{]", "damaged header"),
        (b"\x02" + bytes(7) + b"[]", "not a JSON object"),
        (b"\x07" + bytes(7) + b'{"a":5}', "tensor 'a' lacks a type, a shape or its place"),
        (b"\x38" + bytes(7) + b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}  ', "tensor 'a' lacks"),
        (b"\x50\xc3" + bytes(6) + b"[" * 50000, "damaged header"),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, data, said):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    (folder / "model.safetensors").write_bytes(data)
    (problem,) = checkpoint.read(folder).problems
    assert problem.startswith("model.safetensors ") and said in problem


@pytest.mark.parametrize("target", ["model.safetensors", "nowhere", "."])
def test_a_link_to_no_file_is_named(tmp_path, target):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    (problem,) = checkpoint.read(folder).problems
    assert problem == "model.safetensors is no file, or a link to one that is not there"


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 50000, '{"weight_map": [1]}', '{"weight_map": {"a": {}}}', "\x00"])
def test_an_index_that_lists_no_files_is_named_and_the_files_are_read(tmp_path, text):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    (folder / "model.safetensors.index.json").write_text(text)
    found = checkpoint.read(folder)
    (problem,) = found.problems
    assert problem.startswith("model.safetensors.index.json is damaged (")
    assert len(found.layers) == 2


@pytest.mark.parametrize("text", ["[1]", "null", "[" * 50000])
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    (folder / "config.json").write_text(text)
    assert "config.json is not" in refusal(folder)


@pytest.mark.parametrize("key, value", [("num_experts", 10**12), ("num_hidden_layers", -1), ("hidden_size", 10**30)])
def test_a_count_that_no_model_has_is_refused(tmp_path, key, value):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16(), {key: value})
    assert f"{key} = {value}, which no model has" in refusal(folder)


def test_what_is_no_checkpoint_is_refused_with_what_to_give(tmp_path):
    assert refusal(tmp_path / "none").endswith(
        "is not a folder; give the folder that holds config.json and the safetensors files"
    )
    assert "holds no readable config.json; give" in refusal(tmp_path)
    assert "holds no readable config.json; give" in refusal(tmp_path / ("x" * 300))
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "holds no *.safetensors file; convert" in refusal(tmp_path)


def refusal(folder):
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.read(folder)
    return str(error.value)
