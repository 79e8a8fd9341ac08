"""The method in upstream's clothes: stub parameters, loaders, routing and the end of the load, with upstream's own classes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sgl_kernel_ext", reason="the extension is not built")
pytestmark = pytest.mark.upstream

pytest.register_assert_rewrite("layers")
import layers  # noqa: E402

from sglang.srt.lk import config, formats, roles  # noqa: E402

CASES = layers.CASES


@pytest.fixture
def method(monkeypatch):
    from sglang.srt.lk import compat, method

    monkeypatch.setattr(method, "_args", arguments)
    monkeypatch.setattr(method, "_layers", {})
    monkeypatch.setattr(method, "_drafts", 0)
    monkeypatch.setattr(method, "_layer_count", lambda: None)  # asks a server's own configuration, as does
    monkeypatch.setattr(method, "_deterministic", lambda: False)
    monkeypatch.setattr(compat, "on_cpu", lambda: True)
    return method


def arguments(**changes):
    here = str(Path(__file__).parent)  # a local folder whose files tell nothing
    return SimpleNamespace(**{"device": "cpu", "load_format": "auto", "nnodes": 1, "model_path": here, **changes})


def base_method(name):
    """What upstream chooses for a format, made without a server: (method, scheme)."""
    from sglang.srt.layers.quantization import fp8, modelopt_quant, mxfp4, unquant, w8a8_fp8
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.gptq import gptq

    compressed = bare(compressed_tensors.CompressedTensorsFusedMoEMethod)
    kind, _, rest = name.partition("_")
    if kind in ("bf16", "f16"):
        return bare(unquant.UnquantizedFusedMoEMethod), None
    if name in ("fp8_tensor", "fp8_channel"):
        kinds = {"fp8_tensor": modelopt_quant.ModelOptFp8MoEMethod, "fp8_channel": w8a8_fp8.W8A8FP8MoEMethod}
        return bare(kinds[name], quant_config=SimpleNamespace(is_checkpoint_fp8_serialized=True)), None
    if name == "fp8_block_1_96":
        return compressed, named("CompressedTensorsW8A8Fp8MoE", weight_block_size=[1, 96])
    if kind in ("fp8", "mxfp8"):
        blocks = None if kind == "mxfp8" else [int(size) for size in rest.split("_")[1:]]
        config = SimpleNamespace(is_checkpoint_fp8_serialized=True, weight_block_size=blocks)
        return bare(fp8.Fp8MoEMethod, is_fp4_expert=False, use_mxfp8=kind == "mxfp8", quant_config=config), None
    if kind in ("mxfp4", "deepseek"):
        return bare(mxfp4.Mxfp4MoEMethod) if kind == "mxfp4" else bare(fp8.Fp8MoEMethod, is_fp4_expert=True), None
    if kind == "modelopt":
        config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True)
        return bare(modelopt_quant.ModelOptNvFp4FusedMoEMethod, quant_config=config), None
    if name == "compressed_nvfp4":
        return compressed, named("CompressedTensorsW4A4Nvfp4MoE")
    group = -1 if "channel" in rest else 32
    if kind == "awq":
        return bare(awq.AWQMoEMethod, quant_config=SimpleNamespace(weight_bits=4, group_size=group, zero_point=True)), None
    if kind == "gptq":
        version, ordered = "gptq_v2" if rest == "v2" else "", rest == "ordered"
        config = gptq.CPUGPTQConfig(4, group, ordered, lm_head_quantized=False, dynamic={}, checkpoint_format=version)
        config.is_sym = rest not in ("zeros", "v2")
        return bare(gptq.GPTQMoEMethod, quant_config=config), None
    strategy, zeros = "channel" if group == -1 else "group", "zeros" in rest
    return compressed, named("CompressedTensorsWNA16MoE", num_bits=4, strategy=strategy, group_size=group, sym=not zeros, actorder=None)


def int4(**changes):
    return SimpleNamespace(**{"weight_bits": 4, "group_size": 32, "zero_point": True, "desc_act": False, "is_sym": True, **changes})


NEARLY = {
    "GPTQ with 8 bits is not supported (4 bits are)": ("GPTQMarlinMoEMethod", int4(weight_bits=8), None),
    "GPTQ with 3 bits is not supported (4 bits are)": ("GPTQMoEMethod", int4(weight_bits=3), None),
    "in Marlin's own layout are not supported": ("GPTQMoEMethod", int4(checkpoint_format="marlin"), None),
    "AWQ with 8 bits is not supported (4 bits are)": ("AWQMoEMethod", int4(weight_bits=8), None),
    "compressed-tensors integers of 8 bits are not supported (4 bits are)": (
        "CompressedTensorsFusedMoEMethod", None, ("CompressedTensorsWNA16MoE", dict(num_bits=8)),
    ),
    "--quantization fp8 makes FP8 weights while loading, which hybrid MoE does not": (
        "Fp8MoEMethod", SimpleNamespace(is_checkpoint_fp8_serialized=False), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", NEARLY)
def test_what_is_nearly_a_format_is_refused_by_what_is_wrong_with_it(method, said):
    from sglang.srt.lk.compat import Refusal

    kind, config, scheme = NEARLY[said]
    made = moe_layer(layers.random_layer(CASES["bf16"]), None, named(scheme[0], **scheme[1]) if scheme else None)
    with pytest.raises(Refusal) as caught:
        method.make_for_layer(layer=made, base_method=named(kind, quant_config=config), prefix=layers.NAME)
    assert said in str(caught.value) and layers.NAME in str(caught.value)


@pytest.mark.parametrize("kind, found", [("gptq", formats.Gptq), ("awq", formats.Awq)])
def test_the_mixed_method_has_the_conventions_of_what_it_stands_for(kind, found):
    config = int4(linear_quant_method=kind, has_zp=kind == "awq", full_config={"sym": True, "checkpoint_format": "gptq_v2"})
    del config.is_sym
    made = formats.format_for(named("MoeWNA16Method", quant_config=config), None)
    assert type(made) is found and made.zero_points == (kind == "awq")


@pytest.mark.parametrize("order, wanted", [(None, False), ("weight", False), ("static", False), ("group", True), ("dynamic", True)])
def test_a_column_order_is_waited_for_where_there_is_one(order, wanted):
    scheme = named("CompressedTensorsWNA16MoE", num_bits=4, strategy="group", group_size=32, sym=True, actorder=order)
    made = formats.format_for(named("CompressedTensorsFusedMoEMethod"), scheme)
    assert (formats.ORDER in made.needs) == wanted


@pytest.mark.parametrize("scheme, found", [
    (("CompressedTensorsW8A8Fp8MoE", dict(weight_block_size=None, weight_quant=SimpleNamespace(strategy="channel"))), formats.Fp8Channel),
    (("CompressedTensorsW8A8Fp8MoE", dict(weight_block_size=None, weight_quant=SimpleNamespace(strategy="tensor"))), formats.Fp8Tensor),
    (("QuarkW8A8FP8MoE", dict(weight_qscheme="per_channel")), formats.Fp8Channel),
    (("QuarkW8A8FP8MoE", dict(weight_qscheme="per_tensor")), formats.Fp8Tensor),
])  # fmt: skip
def test_fp8_schemes_tell_how_far_a_scale_reaches(scheme, found):
    assert type(formats.format_for(named("CompressedTensorsFusedMoEMethod"), named(scheme[0], **scheme[1]))) is found


def bare(kind, **attributes):
    made = kind.__new__(kind)
    if isinstance(made, torch.nn.Module):
        torch.nn.Module.__init__(made)
    made.__dict__.update(attributes)
    return made


def named(name, **attributes):
    return bare(type(name, (), {}), **attributes)


@pytest.mark.parametrize("name", CASES)
def test_upstreams_choice_tells_the_format_and_all_its_conventions(name):
    found, expected = formats.format_for(*base_method(name)), CASES[name].format
    assert type(found) is type(expected)
    assert vars(found) == vars(expected)


def moe_layer(layer, base, scheme, *, is_draft=False, **config):
    """As much of a ``FusedMoE`` as a method sees while the layer is being built."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    made = torch.nn.Module()
    made.quant_method = base
    made.scheme = scheme
    made.__dict__.update(
        layer_id=3, is_draft=is_draft, moe_ep_size=1, moe_tp_rank=0, moe_tp_size=1, params_dtype=torch.bfloat16,
        hidden_size=layer.hidden, intermediate_size_per_partition=layer.width, use_presharded_weights=False,
        moe_runner_config=MoeRunnerConfig(activation="silu", **config),
    )  # fmt: skip
    return made


def take_over(method, layer, name, *, bias=False, **config):
    case = CASES[name]
    base, scheme = base_method(name)
    made = moe_layer(layer, base, scheme, **config)
    made.quant_method = method.make_for_layer(layer=made, base_method=base, prefix=layers.NAME)
    made.quant_method.create_weights(
        layer=made, num_experts=len(layer.weights), hidden_size=layer.hidden, intermediate_size_per_partition=layer.width,
        params_dtype=case.dtype, weight_loader=None, with_bias=bias, moe_intermediate_size=layer.width,
    )  # fmt: skip
    made.quant_method.create_moe_runner(made, made.moe_runner_config)
    return made


def load(made, layer, name, *, skip=lambda key: False):
    for (expert, part, what), tensor in layers.tensors(layer, CASES[name]).items():
        if skip((expert, part, what)):
            continue
        fields = CASES[name].format.fields(bias=layer.biases is not None)
        half = "w2" if part == "down" else "w13"
        parameter = next(n for n, field in fields.items() if (field.half, field.what) == (half, what))
        stub = getattr(made, parameter)
        stub.weight_loader(stub, tensor, f"{layers.NAME}.{parameter}", shard_id=layers.SHARD[part], expert_id=expert)


def ask(made, x, ids, weights):
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    topk = StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=torch.empty(0))
    given = StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=topk)
    return made.quant_method.apply(made, given).hidden_states


@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_every_format_is_taken_over_loaded_and_right(method, name):
    layer = layers.random_layer(CASES[name])
    made = take_over(method, layer, name)
    load(made, layer, name)
    made.quant_method.process_weights_after_loading(made)
    x, ids, weights = layers.batch(layer, 5)
    layers.assert_equals_reference(ask(made, x, ids, weights), layer, x, ids, weights)
    assert made.quant_method.get_moe_runner_backend(made) is None and made.quant_method.runner is None


def test_rows_beside_a_gpu_are_handed_over_with_how_many_of_them_are_real(method, monkeypatch):
    from sglang.srt.lk import padding

    layer, given = layers.random_layer(CASES["bf16"]), []
    made = take_over(method, layer, "bf16")
    monkeypatch.setattr(method, "_handover", SimpleNamespace(forward=lambda *tensors, **rest: given.append(rest) or "computed"))
    monkeypatch.setattr(method, "_warms_up", lambda: False)
    monkeypatch.setattr(padding, "_captured", ("the number", 5))
    for rows in (5, 3):
        x, ids, weights = layers.batch(layer, rows)
        assert ask(made, x.to("meta"), ids, weights) == "computed"
    assert [rest["real"] for rest in given] == ["the number", None]


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_store_is_a_parameter_or_buffer(method, name):
    layer = layers.random_layer(CASES[name])
    made = take_over(method, layer, name)
    load(made, layer, name)
    held = [*made.named_parameters(), *made.named_buffers()]
    assert {n for n, _ in held} == set(CASES[name].format.fields(bias=False))
    assert all(tensor.numel() == 0 and tensor.device.type == "cpu" for _, tensor in held)


def test_stubs_are_on_the_host_whatever_device_the_model_is_built_on(method):
    with torch.device("meta"):
        made = take_over(method, layers.random_layer(CASES["mxfp4"]), "mxfp4")
    assert {p.device.type for p in made.parameters()} == {"cpu"}


def test_a_layer_that_is_not_whole_ends_the_load(method):
    from sglang.srt.lk.loading import LoadError

    layer = layers.random_layer(CASES["mxfp4"])
    made = take_over(method, layer, "mxfp4")
    load(made, layer, "mxfp4", skip=lambda key: key == (2, "down", formats.SCALES))
    with pytest.raises(LoadError) as caught:
        made.quant_method.process_weights_after_loading(made)
    assert f"{layers.NAME}: the checkpoint has no expert 2 down scales; " in str(caught.value)


def test_a_dummy_load_fills_the_layer(method, monkeypatch):
    monkeypatch.setattr(method, "_args", lambda: arguments(load_format="dummy"))
    layer = layers.random_layer(CASES["modelopt_nvfp4"])
    made = take_over(method, layer, "modelopt_nvfp4")
    made.quant_method.process_weights_after_loading(made)
    out = ask(made, *layers.batch(layer, 3))
    assert out.isfinite().all() and out.any()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """``hub(stored, revision=..., cache=...)`` fetches ``made/up``, whose layer 3 has codes of that type, long before the server
    starts. Nothing here reaches a network."""
    import huggingface_hub

    from sglang.srt.lk import loading
    from sglang.srt.runtime_context import get_context

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    loading.fetched.cache_clear()

    def fetch(stored, *, revision="main", cache="hub"):
        safetensors = pytest.importorskip("safetensors.torch")
        repository, commit = tmp_path / cache / "models--made--up", f"{stored}-{revision}".replace(".", "-")
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        (repository / "blobs").mkdir(exist_ok=True)
        (repository / "snapshots" / commit).mkdir(parents=True)
        safetensors.save_file({f"{layers.NAME}.0.gate_proj.weight": torch.zeros(1, dtype=stored)}, repository / "blobs" / commit)
        (repository / "snapshots" / commit / "model.safetensors").symlink_to(f"../../blobs/{commit}")

    with get_context().override_server_args():
        yield fetch


def stored_of(method, monkeypatch, *, is_draft=False, **args):
    """What the checkpoint's headers say of the layer's codes, for a server with these arguments."""
    from sglang.srt.lk import loading

    monkeypatch.setattr(method, "_args", lambda: arguments(**args))
    return loading.stored_types(method._folder(is_draft=is_draft), 3).get(formats.CODES)


def test_the_checkpoints_types_are_known_by_a_name_of_a_hub_as_by_a_folder(method, monkeypatch, hub):
    hub(torch.bfloat16)
    monkeypatch.setattr(method, "_args", lambda: arguments(model_path="made/up"))
    layer = layers.random_layer(CASES["f16"])
    made = take_over(method, layer, "f16")  # a bf16 checkpoint with --dtype float16
    assert made.quant_method.store.geometry.dtype is torch.float16
    assert made.quant_method.store.geometry.stored == {formats.CODES: torch.bfloat16}
    assert made.quant_method.store.experts.native.format == "bf16"


def test_a_name_of_a_hub_is_looked_up_with_the_servers_revision_and_folder(method, monkeypatch, hub, tmp_path):
    hub(torch.bfloat16)
    hub(torch.float16, revision="v2")
    hub(torch.float32, cache="elsewhere")
    assert stored_of(method, monkeypatch, model_path="made/up") is torch.bfloat16
    assert stored_of(method, monkeypatch, model_path="made/up", revision="v2") is torch.float16
    assert stored_of(method, monkeypatch, model_path="made/up", download_dir=str(tmp_path / "elsewhere")) is torch.float32


def test_a_draft_model_has_its_own_name_and_revision(method, monkeypatch, hub):
    hub(torch.bfloat16)
    hub(torch.float16, revision="draft")
    own = dict(model_path="made/up", speculative_draft_model_path="made/up", speculative_draft_model_revision="draft")
    assert stored_of(method, monkeypatch, **own) is torch.bfloat16
    assert stored_of(method, monkeypatch, is_draft=True, **own) is torch.float16
    assert stored_of(method, monkeypatch, is_draft=True, model_path="made/up") is torch.bfloat16


def test_checksums_are_compared_once_when_upstream_reads_the_files(method, monkeypatch, hub):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_model
    from sglang.srt.utils import model_file_verifier

    hub(torch.bfloat16)
    compared = []
    monkeypatch.setattr(model_file_verifier, "verify", lambda *, checksums_source, **_: compared.append(checksums_source))
    with get_model().override(model_checksum="made/sums"):
        assert stored_of(method, monkeypatch, model_path="made/up") is torch.bfloat16 and compared == []
        DefaultModelLoader(LoadConfig())._prepare_weights("made/up", None, fall_back_to_pt=True)
    assert compared == ["made/sums"]


def test_a_name_that_cannot_be_fetched_is_an_error_and_no_guess(method, monkeypatch, hub):
    from sglang.srt.lk import loading, patches

    patches.install()
    with pytest.raises(loading.LoadError) as caught:
        stored_of(method, monkeypatch, model_path="made/up")
    assert "the checkpoint cannot be read: " in str(caught.value) and "snapshot" in str(caught.value)


def test_a_dummy_start_fetches_nothing(method, monkeypatch, hub):
    assert stored_of(method, monkeypatch, model_path="made/up", load_format="dummy") is None


def test_a_format_without_kernels_is_refused_with_the_ones_that_have(method):
    from sglang.srt.lk.compat import Refusal

    layer = layers.random_layer(CASES["bf16"])
    made = moe_layer(layer, None, None)
    with pytest.raises(Refusal) as caught:
        method.make_for_layer(layer=made, base_method=type("GGUFMoEMethod", (), {})(), prefix=layers.NAME)
    assert "GGUFMoEMethod" in str(caught.value) and "NVFP4 (ModelOpt)" in str(caught.value)


def test_the_end_of_the_load_says_who_does_what(method, caplog, monkeypatch):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    monkeypatch.setattr(fused, "FusedMoE", torch.nn.Linear)
    layer = layers.random_layer(CASES["mxfp4"])
    made = take_over(method, layer, "mxfp4")
    load(made, layer, "mxfp4")
    made.quant_method.process_weights_after_loading(made)
    with caplog.at_level("INFO"):
        method.finish(torch.nn.Module(), is_draft=False)
    assert "1 MoE layers: 1 cpu" in caplog.text and "MXFP4" in caplog.text and "threads" in caplog.text


def test_a_dense_draft_model_is_upstreams_alone(method, caplog, monkeypatch):
    """As EAGLE's drafts are: one layer without experts beside a model that has them."""
    with caplog.at_level("INFO"):
        method.finish(torch.nn.Module(), is_draft=True)
    assert "the draft model has no MoE layers" in caplog.text
    monkeypatch.setattr(method.boot, "current", lambda: config.Config(gpu_resident_moe_layers_spec=config.LayerSet(frozenset({0}))))
    with pytest.raises(roles.RolesError) as caught:
        method.finish(torch.nn.Module(), is_draft=True)
    assert "LK_GPU_RESIDENT_MOE_LAYERS_SPEC=0: the draft model has no MoE layers" in str(caught.value)


def test_several_draft_models_with_the_same_layer_id_are_all_in_the_table_and_the_metrics(method, caplog, monkeypatch):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    monkeypatch.setattr(fused, "FusedMoE", torch.nn.Linear)
    layer = layers.random_layer(CASES["bf16"])
    for is_draft in (False, True, True):
        made = take_over(method, layer, "bf16", is_draft=is_draft)
        load(made, layer, "bf16")
        made.quant_method.process_weights_after_loading(made)
        caplog.clear()
        with caplog.at_level("INFO"):
            method.finish(torch.nn.Module(), is_draft=is_draft)
    assert "2 MoE layers: 2 cpu" in caplog.text and "draft 2  cpu   3" in caplog.text
    assert method._by_role()["cpu"] == (3, 3 * made.quant_method.store.experts.bytes)


@pytest.mark.parametrize(("module", "factor"), [("deepseek_v2", 1.0), ("glm4_moe", 1.0), ("qwen3_moe", 2.5), ("bailing_moe", 2.5)])
def test_the_routed_scaling_factor_is_applied_once_by_layer_or_model(method, monkeypatch, module, factor):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    layer = layers.random_layer(CASES["bf16"])
    made = take_over(method, layer, "bf16", routed_scaling_factor=2.5)
    load(made, layer, "bf16")
    made.quant_method.process_weights_after_loading(made)
    monkeypatch.setattr(fused, "FusedMoE", type(made.quant_method))
    block = type("Block", (type("Base", (torch.nn.Module,), {"__module__": f"sglang.srt.models.{module}"}),), {})()
    block.experts = made.quant_method  # stands for the layer: it is the module that is looked for
    block.experts.layer_id = 3
    block.experts.__dict__["quant_method"] = made.quant_method
    model = torch.nn.Module()
    model.mlp = block
    method.finish(model, is_draft=False)
    x, ids, weights = layers.batch(layer, 5)
    layers.assert_equals_reference(ask(made, x, ids, weights), layer, x, ids, weights, scale=factor)


def test_a_model_without_experts_is_refused_instead_of_served_as_stock(method):
    with pytest.raises(roles.RolesError) as caught:
        method.finish(torch.nn.Module(), is_draft=False)
    assert "no MoE layer was taken over" in str(caught.value)


def test_a_layer_that_was_missed_is_fatal(method, monkeypatch):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    from sglang.srt.lk.compat import Refusal

    monkeypatch.setattr(fused, "FusedMoE", torch.nn.Linear)
    model = torch.nn.Module()
    model.missed = torch.nn.Linear(1, 1)
    model.missed.layer_id = 0
    with pytest.raises(Refusal) as caught:
        method.finish(model, is_draft=False)
    assert "1 of 1 MoE layers were built without hybrid MoE" in str(caught.value)


@pytest.mark.parametrize("asked", [True, False])
def test_deterministic_inference_asks_the_engine_for_the_same_bits_in_any_batch(method, monkeypatch, asked):
    from sglang.srt.lk import kernels

    made = {}
    monkeypatch.setattr(kernels, "_engine", None)
    monkeypatch.setattr(method, "_deterministic", lambda: asked)
    extension = kernels.extension()

    def engine(**options):
        made.update(options)
        return extension.Engine(**options)

    monkeypatch.setattr(kernels, "extension", lambda: SimpleNamespace(Engine=engine, Experts=extension.Experts))
    take_over(method, layers.random_layer(CASES["bf16"]), "bf16")
    assert made["batch_invariant"] is asked


def test_a_layer_that_was_not_loaded_is_fatal(method, monkeypatch):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    from sglang.srt.lk.loading import LoadError

    monkeypatch.setattr(fused, "FusedMoE", torch.nn.Linear)
    take_over(method, layers.random_layer(CASES["mxfp4"]), "mxfp4")
    with pytest.raises(LoadError) as caught:
        method.finish(torch.nn.Module(), is_draft=False)
    assert "not loaded to the end" in str(caught.value)


def test_only_a_forward_before_a_capture_is_left_out_not_the_replay_of_a_graph_in_pieces(method, monkeypatch):
    """``--debug-cuda-graph`` runs the whole forward between two pieces, and the scope of a replay is that of a capture."""
    from sglang.srt.model_executor.runner import get_is_capture_mode, model_capture_mode
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import enable_breakable_cuda_graph

    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert not method._warms_up()
    with enable_breakable_cuda_graph():  # a replay
        assert get_is_capture_mode() and not method._warms_up()
        with model_capture_mode():  # a capture
            assert method._warms_up()
    with model_capture_mode():
        assert method._warms_up()
        capturing[0] = True
        assert not method._warms_up()


@pytest.mark.parametrize("backend, tail", [("breakable", 2048), ("breakable", 0), ("disabled", 128)])
def test_beside_a_gpu_prefill_graphs_are_off_decode_keeps_them_and_it_is_said_once(method, monkeypatch, caplog, backend, tail):
    from sglang.srt import runtime_context
    from sglang.srt.models import deepseek_v4_replay_tail as upstream

    graphs = SimpleNamespace(decode=SimpleNamespace(backend="full"), prefill=SimpleNamespace(backend=backend))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs)))
    monkeypatch.setenv("SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS", str(tail))
    monkeypatch.setattr(upstream, "is_cuda", lambda: True)
    monkeypatch.setattr(upstream.DecoderReplayTail, "__init__", lambda self, **_: None)
    model = SimpleNamespace(tail_writes_source_kv=True, late_layer_start=2, end_layer=4)
    assert (upstream.DecoderReplayTail.maybe_create(model) is not None) == (tail > 0)
    with caplog.at_level("INFO"):
        method._without_prefill_graphs()
        method._without_prefill_graphs()
    assert (graphs.decode.backend, graphs.prefill.backend) == ("full", "disabled")
    assert upstream.DecoderReplayTail.maybe_create(model) is None
    assert sum("prefill runs without CUDA graphs" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("decode, args, rows", [
    (dict(max_bs=None, bs=None), dict(chunked_prefill_size=-1), 256),
    (dict(max_bs=512, bs=[1, 512]), dict(chunked_prefill_size=-1), 512),
    (dict(max_bs=64, bs=[1, 64]), dict(chunked_prefill_size=-1, speculative_num_draft_tokens=8), 512),
    (dict(max_bs=64, bs=[1, 64]), dict(chunked_prefill_size=8192), 8192),
])  # fmt: skip
def test_buffers_hold_the_largest_captured_batch_and_one_chunk(method, monkeypatch, decode, args, rows):
    from sglang.srt import runtime_context

    graphs = SimpleNamespace(decode=SimpleNamespace(**decode))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs)))
    assert method._largest_batch(SimpleNamespace(**args)) == rows
