"""What is refused, and that everything wrong is said at once with the flag to change."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang.srt.lk import compat, formats, kernels  # noqa: E402


def runner_config(**changes):
    plain = dict(
        activation="silu", is_gated=True, gemm1_alpha=None, gemm1_clamp_limit=None, swiglu_limit=None, no_combine=False,
        routed_scaling_factor=None, apply_router_weight_on_input=False, gate_up_interleaved=True,
    )  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


def layer(**changes):
    plain = dict(
        params_dtype=torch.bfloat16, hidden_size=64, intermediate_size_per_partition=96, moe_ep_size=1, moe_tp_rank=0, moe_tp_size=1, scheme=None,
        moe_runner_config=runner_config(),
    )  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


def arguments(**changes):
    return SimpleNamespace(**{"device": "cpu", "load_format": "auto", **changes})


def problems(*, changed_layer=None, format=None, **changes) -> tuple[str, ...]:
    """Empty when the layer is taken over."""
    try:
        compat.check(
            layer=changed_layer or layer(),
            name="model.layers.5.mlp.experts",
            method=object(),
            format=format or formats.Unquantized(),
            args=arguments(**changes),
        )
    except compat.Refusal as refusal:
        assert all(problem in str(refusal) for problem in refusal.problems)
        assert "model.layers.5.mlp.experts" in str(refusal) and "\n" not in str(refusal)
        return refusal.problems
    return ()


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch):
    monkeypatch.setattr(compat, "on_cpu", lambda: True)


def test_a_plain_layer_is_taken_over():
    assert problems() == ()
    assert problems(ep_size=1, moe_a2a_backend="none", dwdp_size=1, load_format="dummy", lora_paths=[]) == ()
    assert problems(attn_dp_size=1, speculative_algorithm="NEXTN") == ()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kt_weight_path", "/x"), ("enable_paged_experts", True), ("enable_eplb", True), ("ep_num_redundant_experts", 2),
        ("init_expert_location", "x.pt"), ("ep_size", 2), ("moe_a2a_backend", "deepep"), ("elastic_ep_backend", "mooncake"),
        ("dwdp_size", 2), ("enable_lora", True), ("lora_paths", ["x"]), ("enable_two_batch_overlap", True),
        ("enable_single_batch_overlap", True), ("enable_pdmux", True), ("enable_torch_compile", True),
        ("enable_fused_moe_sum_all_reduce", True), ("startup_weight_load_mode", "overlap"), ("weight_cache_mode", "shared"), ("enable_memory_saver", True),
        ("moe_runner_backend", "triton_kernel"), ("load_format", "gguf"),
        ("enable_dp_attention", True), ("attn_dp_size", 2), ("speculative_algorithm", "UNO"),
    ],
)  # fmt: skip
def test_each_argument_that_cannot_be_served_is_named_by_its_flag(argument, value):
    (problem,) = problems(**{argument: value})
    assert "--" + argument.replace("_", "-") in problem


def test_everything_wrong_is_one_message():
    odd = layer(moe_ep_size=2, moe_runner_config=runner_config(activation="situ", no_combine=True))
    found = problems(changed_layer=odd, enable_eplb=True, enable_lora=True, device="xpu")
    assert len(found) == 6
    for said in ("--enable-eplb", "--enable-lora", "--device xpu", "--ep-size 1", "no_combine", "'situ'"):
        assert any(said in problem for problem in found)


def test_a_device_left_to_upstream_is_the_one_upstream_takes(monkeypatch):
    assert compat.device(SimpleNamespace(device="cuda:1")) == "cuda" and compat.device(SimpleNamespace(device="cpu")) == "cpu"


def test_an_unknown_format_is_refused_with_the_known_ones(monkeypatch):
    with pytest.raises(compat.Refusal) as caught:
        compat.check(layer=layer(scheme="x"), name="model.layers.5.mlp.experts", method=dict(), format=None, args=arguments())
    message = str(caught.value)
    assert "(dict with str)" in message and "model.layers.5.mlp.experts" in message
    assert all(known.label in message for known in formats.FORMATS)
    assert "LK_MOE_HYBRID_ENABLED=0" in message


def test_the_cpu_platform_of_upstream_must_be_chosen(monkeypatch):
    monkeypatch.setattr(compat, "on_cpu", lambda: False)
    assert problems() == ("--device cpu needs SGLANG_USE_CPU_ENGINE=1 in the environment",)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("hidden", "width", "count"), [(64, 96, 0), (48, 96, 1), (64, 80, 1), (80, 80, 2)])
def test_scales_that_straddle_an_edge_are_refused_with_the_number(hidden, width, count, ranks):
    odd = layer(hidden_size=hidden, intermediate_size_per_partition=width, moe_tp_size=ranks)
    found = problems(changed_layer=odd, format=formats.Mxfp4())
    assert len(found) == count
    assert all("no multiple of the 32" in problem for problem in found)
    assert ("--tp-size" in "".join(found)) == (width == 80 and ranks > 1)
    assert problems(changed_layer=odd) == ()  # bf16 has no scales


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, kernels.Activation()),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, kernels.Activation(alpha=1.702, limit=7.0, up_bias=1.0)),
        ({"gemm1_clamp_limit": 7.0}, kernels.Activation(limit=7.0, limit_after=True)),
        ({"swiglu_limit": 10.0}, kernels.Activation(limit=10.0)),
        ({"activation": "gelu_tanh"}, kernels.Activation(name="gelu_tanh")),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations_follow_upstreams_runner(config, device, expected):
    assert compat.activation(runner_config(**config), device=device) == (expected, None)


@pytest.mark.parametrize(("device", "form"), [("cpu", "gelu_tanh"), ("cuda", "gelu")])
def test_gelu_is_what_upstream_calls_so_on_the_device(device, form):
    assert compat.activation(runner_config(activation="gelu"), device=device) == (kernels.Activation(name=form), None)


@pytest.mark.upstream
def test_upstreams_gelu_is_the_tanh_form_on_a_cpu():
    from sglang.srt.layers.activation import GeluAndMul

    gate = torch.linspace(-4, 4, 64)
    out = GeluAndMul().forward_native(torch.cat([gate, torch.ones(64)]))
    assert torch.equal(out, torch.nn.functional.gelu(gate, approximate="tanh"))
    assert not torch.allclose(out, torch.nn.functional.gelu(gate), rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [{"activation": "situ"}, {"is_gated": False, "activation": "relu2"}, {"activation": "gelu", "gemm1_alpha": 1.0}], ids=str)
def test_other_activations_are_refused_by_name(config):
    assert config.get("activation", "silu") in compat.activation(runner_config(**config), device="cpu")[1]
