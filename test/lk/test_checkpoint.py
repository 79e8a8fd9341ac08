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


def int4(kind, bits=4, group=32, scales="F16", **where):
    """The names and shapes of what packs integers in words of 32 bits."""
    kinds = {
        "awq": {
            "qweight": lambda r, c: ("I32", (c, r * bits // 32)),
            "qzeros": lambda r, c: ("I32", (c // group, r * bits // 32)),
            "scales": lambda r, c: (scales, (c // group, r)),
        },
        "gptq": {
            "qweight": lambda r, c: ("I32", (c * bits // 32, r)),
            "qzeros": lambda r, c: ("I32", (c // group, r * bits // 32)),
            "scales": lambda r, c: (scales, (c // group, r)),
            "g_idx": lambda r, c: ("I32", (c,)),
        },
        "compressed": {
            "weight_packed": lambda r, c: ("I32", (r, c * bits // 32)),
            "weight_scale": lambda r, c: (scales, (r, c // group)),
            "weight_shape": lambda r, c: ("I32", (2,)),
        },
    }
    return headers.per_expert(kinds[kind], **where)


def fp8(rows, columns, name="weight_scale_inv"):
    """A scale for each block of so many rows and columns; 0: of all of them."""
    return headers.per_expert(
        {
            "weight": lambda r, c: ("F8_E4M3", (r, c)),
            name: lambda r, c: ("F32", (-(-r // rows) if rows else 1, -(-c // columns) if columns else 1)),
        }
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
    "int4 of AWQ": ("int4", int4("awq")),
    "int4 of GPTQ": ("int4", int4("gptq")),
    "int4 of compressed-tensors": ("int4", int4("compressed")),
    "int8 of GPTQ": ("int8", int4("gptq", bits=8)),
    "int3 of GPTQ": ("int3", int4("gptq", bits=3)),
    "int8 of compressed-tensors": ("int8", int4("compressed", bits=8)),
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


CODED = {
    "blocks of whole panels": (fp8(16, 32), {}, {"group": 32, "scales": "f32_shared"}),
    "blocks of single rows": (fp8(1, 32), {}, {"group": 32, "scales": "f32"}),
    "fp8 per tensor": (fp8(0, 0, "weight_scale"), {}, {}),
    "fp8 per channel": (fp8(1, 0, "weight_scale"), {}, {}),
    "AWQ": (int4("awq"), {}, {"group": 32, "scales": "f16", "zeros": True}),
    "GPTQ": (int4("gptq", scales="BF16"), {"sym": False}, {"group": 32, "scales": "bf16", "zeros": True}),
    "symmetric GPTQ": (int4("gptq"), {"sym": True}, {"group": 32, "scales": "f16", "zeros": False}),
    "compressed-tensors": (int4("compressed", scales="BF16"), {}, {"group": 32, "scales": "bf16", "zeros": False}),
    "compressed-tensors, F32": (int4("compressed", scales="F32"), {}, {"group": 32, "scales": "f32", "zeros": False}),
}


@pytest.mark.parametrize("case", CODED)
def test_what_else_decides_the_packed_size_is_read_from_the_scales(tmp_path, case):
    tensors, says, packing = CODED[case]
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", tensors, {"quantization_config": says}))
    assert [layer.packing for layer in found.layers] == [packing, packing]


def test_an_index_entry_that_another_shard_makes_up_for_is_only_stale(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors", name: "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint.read(folder).problems == []


def test_a_tensor_in_two_shards_is_a_doubt_and_counted_once(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    once = checkpoint.read(folder)
    headers.write_file(folder / "old.safetensors", headers.bf16(layers=(1,)))
    found = checkpoint.read(folder)
    assert found.problems == [] and found.layers == once.layers and found.other_bytes == once.other_bytes
    (doubt,) = found.doubts
    first = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert doubt == f"12 tensors of old.safetensors are in model.safetensors, too ({first}): whichever is read last counts"


@pytest.mark.parametrize("says, doubts", [({"desc_act": True, "group_size": 128}, 1), ({"desc_act": True, "group_size": -1}, 0), ({"desc_act": False}, 0), ([], 0)])
def test_columns_in_act_order_are_a_doubt(tmp_path, says, doubts):
    found = checkpoint.read(headers.checkpoint(tmp_path / "m", int4("gptq"), {"quantization_config": says}))
    assert len(found.doubts) == doubts and all("desc_act" in doubt for doubt in found.doubts)


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
