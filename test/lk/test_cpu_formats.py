"""Upstream's configurations of quantized checkpoints on a CPU, patched as the start patches them."""

import types

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.upstream

from sglang.srt.lk import cpu_formats, patches  # noqa: E402


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    patches.install()
    monkeypatch.setattr(cpu_formats, "on_cpu", lambda: True)


def layer(name):
    """An empty expert or linear layer: what the configurations tell apart."""
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    made = {"experts": FusedMoE, "linear": ReplicatedLinear}[name]
    made = made.__new__(made)
    torch.nn.Module.__init__(made)
    return made


def awq(kind):
    from sglang.srt.layers.quantization.awq import awq as module

    return getattr(module, kind)(4, 128, True, modules_to_not_convert=["self_attn", "layers.7."])


def gptq(**changes):
    from sglang.srt.layers.quantization.gptq.gptq import CPUGPTQConfig

    says = dict(bits=4, group_size=128, desc_act=False, sym=True, dynamic={r"-:.*self_attn.*": {}, r"-:.*layers\.7\..*": {}})
    return CPUGPTQConfig.from_config({**says, **changes})


@pytest.mark.parametrize("kind", ["AWQConfig", "AWQCPUConfig"])
def test_awq_experts_are_awq_experts_also_without_amx(kind):
    found = awq(kind).get_quant_method(layer("experts"), "model.layers.3.mlp.experts")
    assert type(found).__name__ == "AWQMoEMethod" and found.quant_config.group_size == 128


@pytest.mark.parametrize("config", [lambda: awq("AWQConfig"), lambda: awq("AWQCPUConfig"), gptq], ids=["awq", "awq_amx", "gptq"])
def test_what_the_checkpoint_leaves_out_stays_unquantized(config):
    linear = config().get_quant_method(layer("linear"), "model.layers.3.self_attn.o_proj")
    assert type(linear).__name__ == "UnquantizedLinearMethod"
    assert config().get_quant_method(layer("experts"), "model.layers.7.mlp.experts") is None


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_experts_keep_what_the_checkpoint_says_of_them(symmetric):
    found = gptq(sym=symmetric, checkpoint_format="gptq_v2").get_quant_method(layer("experts"), "model.layers.3.mlp.experts")
    assert type(found).__name__ == "GPTQMoEMethod"
    assert (found.quant_config.is_sym, found.quant_config.checkpoint_format) == (symmetric, "gptq_v2")


def test_with_a_gpu_upstream_chooses(monkeypatch):
    monkeypatch.setattr(cpu_formats, "on_cpu", lambda: False)
    assert awq("AWQConfig").get_quant_method(layer("experts"), "model.layers.3.mlp.experts") is None
    assert torch.float32 not in awq("AWQConfig").get_supported_act_dtypes()


def test_quantized_models_may_run_in_every_float_type():
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    for config in (awq("AWQConfig"), awq("AWQCPUConfig"), gptq(), Fp8Config):
        assert {torch.bfloat16, torch.float16, torch.float32} <= set(config.get_supported_act_dtypes())


@pytest.mark.parametrize(
    ("config", "named", "kept"),
    [
        (dict(moe_intermediate_size=96, intermediate_size=200, num_experts=8), "moe_intermediate_size", 96),
        (dict(intermediate_size=200, num_local_experts=8), "intermediate_size", 200),
        (dict(moe_intermediate_size=96, intermediate_size=200, num_experts=8), "intermediate_size", 256),
        (dict(intermediate_size=200), "intermediate_size", 256),
    ],
)  # fmt: skip
def test_experts_keep_the_width_of_the_checkpoint_and_dense_layers_are_widened_as_upstream_does(config, named, kept):
    from sglang.srt.configs import update_config

    text = types.SimpleNamespace(**config)
    model = types.SimpleNamespace(hf_config=text, hf_text_config=text)
    update_config.update_intermediate_size(model, named, 128)
    assert getattr(text, named) == kept


def test_blocks_need_not_be_square():
    from sglang.srt.configs import update_config

    assert update_config.get_moe_padding_size([1, 32]) == 32
    assert update_config.get_moe_padding_size([128, 128]) == 128
    assert update_config.get_moe_padding_size([64]) == 64
    assert update_config.get_moe_padding_size(None) == update_config.DEFAULT_MOE_PADDING_SIZE


def test_a_rank_may_cut_a_block():
    from sglang.srt.model_executor.model_runner_components import moe_ep_setup

    text = types.SimpleNamespace(moe_intermediate_size=1536)
    model = types.SimpleNamespace(hf_config=types.SimpleNamespace(quantization_config={"weight_block_size": [128, 128]}), hf_text_config=text)
    assert moe_ep_setup.check_quantized_moe_compatibility(model_config=model, tp_size=8, moe_ep_size=1, moe_dp_size=1) is None


@pytest.mark.parametrize("name", ["modelopt_fp4", "modelopt_fp8", "mxfp8", "w8a8_fp8"])
def test_formats_whose_experts_are_ours_are_known_to_a_cpu_with_amx(name):
    from sglang.srt.layers import quantization

    assert quantization.CPU_QUANTIZATION_METHODS[name] is quantization.BASE_QUANTIZATION_METHODS[name]
