"""The method in upstream's clothes: stub parameters, loaders, routing and the end of the load, with upstream's own classes."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sgl_kernel_ext", reason="the extension is not built")
pytestmark = pytest.mark.upstream

pytest.register_assert_rewrite("layers")
import layers  # noqa: E402

from sglang.srt.lk import formats, roles  # noqa: E402

FORMATS = {known.__name__: known() for known in formats.FORMATS}


@pytest.fixture
def method(monkeypatch):
    from sglang.srt.lk import compat, method

    monkeypatch.setattr(method, "_args", lambda: SimpleNamespace(device="cpu", load_format="auto", nnodes=1))
    monkeypatch.setattr(method, "_layers", {})
    monkeypatch.setattr(method, "_layer_count", lambda: None)  # asks a server's own configuration
    monkeypatch.setattr(compat, "_upstream_cpu", lambda: True)
    return method


def base_method(name):
    """What upstream chooses for a format, made without a server: (method, scheme)."""
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    def bare(kind, **attributes):
        made = kind.__new__(kind)
        if isinstance(made, torch.nn.Module):
            torch.nn.Module.__init__(made)
        made.__dict__.update(attributes)
        return made

    scheme = type("CompressedTensorsW4A4Nvfp4MoE", (), {})() if name == "CompressedTensorsNvfp4" else None
    serialized = SimpleNamespace(is_checkpoint_nvfp4_serialized=True)
    return {
        "Unquantized": lambda: bare(UnquantizedFusedMoEMethod),
        "Mxfp4": lambda: bare(Mxfp4MoEMethod),
        "DeepseekMxfp4": lambda: bare(Fp8MoEMethod, is_fp4_expert=True),
        "ModelOptNvfp4": lambda: bare(ModelOptNvFp4FusedMoEMethod, quant_config=serialized),
        "CompressedTensorsNvfp4": lambda: bare(type("CompressedTensorsFusedMoEMethod", (), {})),
    }[name](), scheme


def moe_layer(layer, base, scheme, **config):
    """As much of a ``FusedMoE`` as a method sees while the layer is being built."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    made = torch.nn.Module()
    made.quant_method = base
    made.scheme = scheme
    made.__dict__.update(
        layer_id=3, is_draft=False, moe_ep_size=1, moe_tp_rank=0, moe_tp_size=1, params_dtype=torch.bfloat16,
        hidden_size=layer.hidden, intermediate_size_per_partition=layer.width, use_presharded_weights=False,
        moe_runner_config=MoeRunnerConfig(activation="silu", **config),
    )  # fmt: skip
    return made


def take_over(method, layer, name, *, bias=False, **config):
    base, scheme = base_method(name)
    made = moe_layer(layer, base, scheme, **config)
    made.quant_method = method.make_for_layer(layer=made, base_method=base, prefix=layers.NAME)
    made.quant_method.create_weights(
        layer=made, num_experts=len(layer.weights), hidden_size=layer.hidden, intermediate_size_per_partition=layer.width,
        params_dtype=torch.bfloat16, weight_loader=None, with_bias=bias, moe_intermediate_size=layer.width,
    )  # fmt: skip
    made.quant_method.create_moe_runner(made, made.moe_runner_config)
    return made


def load(made, layer, name, *, skip=lambda key: False):
    for (expert, part, what), tensor in layers.tensors(layer, FORMATS[name]).items():
        if skip((expert, part, what)):
            continue
        fields = FORMATS[name].fields(bias=layer.biases is not None)
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_of_every_format_is_taken_over_loaded_and_right(method, name):
    layer = layers.random_layer(FORMATS[name])
    made = take_over(method, layer, name)
    load(made, layer, name)
    made.quant_method.process_weights_after_loading(made)
    x, ids, weights = layers.batch(layer, 5)
    layers.assert_equals_reference(ask(made, x, ids, weights), layer, x, ids, weights)
    assert made.quant_method.get_moe_runner_backend(made) is None and made.quant_method.runner is None


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_of_the_store_is_a_parameter_or_buffer(method, name):
    layer = layers.random_layer(FORMATS[name])
    made = take_over(method, layer, name)
    load(made, layer, name)
    held = [*made.named_parameters(), *made.named_buffers()]
    assert {n for n, _ in held} == set(FORMATS[name].fields(bias=False))
    assert all(tensor.numel() == 0 and tensor.device.type == "cpu" for _, tensor in held)


def test_stubs_are_on_the_host_whatever_device_the_model_is_built_on(method):
    with torch.device("meta"):
        made = take_over(method, layers.random_layer(FORMATS["Mxfp4"]), "Mxfp4")
    assert {p.device.type for p in made.parameters()} == {"cpu"}


def test_a_layer_that_is_not_whole_ends_the_load(method):
    from sglang.srt.lk.loading import LoadError

    layer = layers.random_layer(FORMATS["Mxfp4"])
    made = take_over(method, layer, "Mxfp4")
    load(made, layer, "Mxfp4", skip=lambda key: key == (2, "down", formats.SCALES))
    with pytest.raises(LoadError) as caught:
        made.quant_method.process_weights_after_loading(made)
    assert f"{layers.NAME}: the checkpoint has no expert 2 down scales; " in str(caught.value)


def test_a_dummy_load_fills_the_layer(method, monkeypatch):
    monkeypatch.setattr(method, "_args", lambda: SimpleNamespace(device="cpu", load_format="dummy", nnodes=1))
    layer = layers.random_layer(FORMATS["ModelOptNvfp4"])
    made = take_over(method, layer, "ModelOptNvfp4")
    made.quant_method.process_weights_after_loading(made)
    out = ask(made, *layers.batch(layer, 3))
    assert out.isfinite().all() and out.any()


def test_a_format_without_kernels_is_refused_with_the_ones_that_have(method):
    from sglang.srt.lk.compat import Refusal

    layer = layers.random_layer(FORMATS["Unquantized"])
    made = moe_layer(layer, None, None)
    with pytest.raises(Refusal) as caught:
        method.make_for_layer(layer=made, base_method=type("AWQMoEMethod", (), {})(), prefix=layers.NAME)
    assert "AWQMoEMethod" in str(caught.value) and "NVFP4 (ModelOpt)" in str(caught.value)


def test_the_end_of_the_load_says_who_does_what(method, caplog, monkeypatch):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    monkeypatch.setattr(fused, "FusedMoE", torch.nn.Linear)
    layer = layers.random_layer(FORMATS["Mxfp4"])
    made = take_over(method, layer, "Mxfp4")
    load(made, layer, "Mxfp4")
    made.quant_method.process_weights_after_loading(made)
    with caplog.at_level("INFO"):
        method.finish(torch.nn.Module(), is_draft=False)
    assert "1 MoE layers: 1 cpu" in caplog.text and "MXFP4" in caplog.text and "threads" in caplog.text


@pytest.mark.parametrize(("module", "factor"), [("deepseek_v2", 1.0), ("glm4_moe", 1.0), ("qwen3_moe", 2.5), ("bailing_moe", 2.5)])
def test_the_routed_scaling_factor_is_applied_once_by_layer_or_model(method, monkeypatch, module, factor):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    layer = layers.random_layer(FORMATS["Unquantized"])
    made = take_over(method, layer, "Unquantized", routed_scaling_factor=2.5)
    load(made, layer, "Unquantized")
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


def test_a_layer_that_was_not_loaded_is_fatal(method, monkeypatch):
    import sglang.srt.layers.moe.fused_moe_triton as fused

    from sglang.srt.lk.loading import LoadError

    monkeypatch.setattr(fused, "FusedMoE", torch.nn.Linear)
    take_over(method, layers.random_layer(FORMATS["Mxfp4"]), "Mxfp4")
    with pytest.raises(LoadError) as caught:
        method.finish(torch.nn.Module(), is_draft=False)
    assert "not loaded to the end" in str(caught.value)


def test_beside_a_gpu_graphs_are_off_and_it_is_said_once(method, monkeypatch, caplog):
    from sglang.srt import runtime_context

    graphs = SimpleNamespace(decode=SimpleNamespace(backend="full"), prefill=SimpleNamespace(backend="breakable"))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs)))
    with caplog.at_level("INFO"):
        method._without_graphs()
        method._without_graphs()
    assert graphs.decode.backend == graphs.prefill.backend == "disabled"
    assert sum("CUDA graphs are off" in record.message for record in caplog.records) == 1
