"""Quantized layers beside the experts, decoded: the very values that the checkpoint means."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import written  # noqa: E402

from sglang.srt.lk import cpu_linear  # noqa: E402
from sglang.srt.lk.formats import CHANNEL, CODES, GLOBAL, ORDER, SCALES, ZEROS  # noqa: E402

ROWS, COLUMNS = 48, 96


def random():
    return np.random.default_rng(3)


def linear(dtype=torch.float32, **parameters):
    made = torch.nn.Module()
    made.params_dtype = dtype
    for name, value in parameters.items():
        if isinstance(value, torch.Tensor):
            made.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        else:
            setattr(made, name, value)
    return made


def method(name, **attributes):
    made = type(name, (), {})()
    made.__dict__.update(attributes)
    return made


def decoded(kind, layer) -> torch.nn.Module:
    found = cpu_linear.decoded(kind, layer)
    assert found is kind
    found.process_weights_after_loading(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    return layer


def assert_means(layer, values, exactly=False):
    """f32 products of a code and a scale: one rounding."""
    error = np.abs(layer.weight.double().numpy() - values)
    assert (error <= (0 if exactly else 2.0**-23) * np.abs(values)).all() and np.abs(values).max() > 0


@pytest.mark.parametrize("blocks", [(32, 64), (48, 96), (1, 32), (128, 128)])
def test_fp8_blocks(blocks):
    made = written.fp8_block(ROWS, COLUMNS, random(), blocks)
    layer = linear(weight=made.tensors[CODES], weight_scale_inv=made.tensors[SCALES], logical_widths=[ROWS])
    assert_means(decoded(method("Fp8LinearMethod", weight_block_size=list(blocks)), layer), made.values)


def test_fp8_matrices_that_are_stacked_keep_their_own_scales():
    parts = [written.fp8_tensor(rows, COLUMNS, random()) for rows in (32, 16, 16)]
    layer = linear(
        weight=torch.cat([part.tensors[CODES] for part in parts]),
        weight_scale=torch.stack([part.tensors[GLOBAL] for part in parts]),
        input_scale=torch.zeros(3),
        logical_widths=[32, 16, 16],
    )
    values = np.concatenate([part.values for part in parts])
    assert_means(decoded(method("Fp8LinearMethod", weight_block_size=None), layer), values)


def test_fp8_channels_of_compressed_tensors():
    made = written.fp8_channel(ROWS, COLUMNS, random())
    layer = linear(weight=made.tensors[CODES], weight_scale=made.tensors[CHANNEL], logical_widths=[ROWS])
    layer.scheme = method("CompressedTensorsW8A16Fp8")
    layer.weight_block_size = None
    assert_means(decoded(method("CompressedTensorsLinearMethod"), layer), made.values)


def test_mxfp8_is_exact():
    made = written.mxfp8(ROWS, COLUMNS, random())
    layer = linear(weight=made.tensors[CODES], weight_scale_inv=made.tensors[SCALES], logical_widths=[ROWS])
    assert_means(decoded(method("Fp8LinearMethod", weight_block_size=[1, 32]), layer), made.values, exactly=True)


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("more", [0, 1])
def test_gptq_in_both_versions(group, more):
    made = written.int4(ROWS, COLUMNS, random(), "gptq", group, zeros=True, more=more)
    scales = made.tensors[SCALES if SCALES in made.tensors else CHANNEL]
    layer = linear(qweight=made.tensors[CODES], qzeros=made.tensors[ZEROS], scales=scales, g_idx=made.tensors[ORDER])
    config = SimpleNamespace(checkpoint_format="" if more else "gptq_v2", desc_act=False)
    assert_means(decoded(method("GPTQLinearMethod", quant_config=config), layer), made.values)


def test_gptq_columns_may_be_grouped_in_any_order():
    made = written.int4(ROWS, COLUMNS, random(), "gptq", 32, zeros=True)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    codes = np.stack([(made.tensors[CODES].numpy().view(np.uint32) >> np.uint32(4 * n)) & 15 for n in range(8)], axis=1).reshape(COLUMNS, ROWS)
    mixed = written._words(codes[order.numpy()].T, range(8)).T.contiguous()
    layer = linear(qweight=mixed, qzeros=made.tensors[ZEROS], scales=made.tensors[SCALES], g_idx=made.tensors[ORDER][order])
    config = SimpleNamespace(checkpoint_format="", desc_act=True)
    assert_means(decoded(method("GPTQLinearMethod", quant_config=config), layer), made.values[:, order.numpy()])


@pytest.mark.parametrize("group", [32, 96])
def test_awq(group):
    made = written.int4(ROWS, COLUMNS, random(), "awq", group, zeros=True)
    layer = linear(qweight=made.tensors[CODES], qzeros=made.tensors[ZEROS], scales=made.tensors[SCALES])
    assert_means(decoded(method("AWQLinearMethod"), layer), made.values)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("group", [32, -1])
def test_integers_of_compressed_tensors(zeros, group):
    made = written.int4(ROWS, COLUMNS, random(), "compressed", group, zeros=zeros)
    tensors = {"weight_packed": made.tensors[CODES], "weight_scale": made.tensors[SCALES if SCALES in made.tensors else CHANNEL]}
    tensors |= {"weight_zero_point": made.tensors[ZEROS]} if zeros else {}
    layer = linear(**tensors)
    layer.scheme = method("CompressedTensorsWNA16")
    assert_means(decoded(method("CompressedTensorsLinearMethod"), layer), made.values)


def test_the_layer_multiplies_in_the_models_type_and_keeps_its_bias():
    made = written.fp8_channel(ROWS, COLUMNS, random())
    layer = linear(torch.bfloat16, weight=made.tensors[CODES], weight_scale=made.tensors[CHANNEL], logical_widths=[ROWS], bias=torch.ones(ROWS))
    kind = method("Fp8LinearMethod", weight_block_size=None)
    cpu_linear.decoded(kind, layer).process_weights_after_loading(layer)
    x = torch.ones(3, COLUMNS, dtype=torch.bfloat16)
    out = kind.apply(layer, x, layer.bias.bfloat16())
    assert layer.weight.dtype is torch.bfloat16 and out.dtype is torch.bfloat16
    assert torch.equal(out, torch.nn.functional.linear(x, layer.weight, torch.ones(ROWS, dtype=torch.bfloat16)))


def test_what_is_not_known_keeps_upstreams_behaviour():
    kind = method("UnquantizedLinearMethod")
    assert cpu_linear.decoded(kind, linear()) is kind and not vars(kind)
