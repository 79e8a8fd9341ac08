"""Checkpoint tensors through the loaders into the real kernels, and every way in which a checkpoint can be wrong."""

import json
import dataclasses
import threading
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sgl_kernel_ext", reason="the extension is not built")
safetensors = pytest.importorskip("safetensors.torch")

pytest.register_assert_rewrite("layers")
import layers  # noqa: E402

from sglang.srt.lk import formats, loading  # noqa: E402
from sglang.srt.lk import store as ledger  # noqa: E402
from sglang.srt.lk.formats import BIAS, CHANNEL, CODES, GLOBAL, ORDER, SCALES, UNUSED, ZEROS  # noqa: E402
from sglang.srt.lk.formats.geometry import COLUMNS, ROWS  # noqa: E402

CASES = layers.CASES
ACTIVATIONS = {
    "silu": layers.reference.Activation(),
    "gelu": layers.reference.Activation("gelu_tanh"),
    "gpt_oss": layers.reference.Activation(alpha=1.702, limit=0.5, up_bias=1.0),
    "clamped_before": layers.reference.Activation(limit=0.3),
    "clamped_after": layers.reference.Activation(limit=0.2, limit_after=True),
}


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Whatever the package allocates holds NaN until it is written."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_loaded_layer_equals_the_float64_reference(case, activation):
    layer = layers.random_layer(case, activation=ACTIVATIONS[activation])
    store = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case))
    assert store.missing() == []
    for tokens in (1, 3, 17):
        x, ids, weights = layers.batch(layer, tokens)
        layers.assert_equals_reference(store.experts.forward(x, ids, weights), layer, x, ids, weights)


@pytest.mark.parametrize("options", [{}, {"scale": 2.5}, {"weight_on_input": True}], ids=str)
def test_biases_scaling_and_weights_on_input_follow_the_reference(options):
    case = CASES["mxfp4"]
    layer = layers.random_layer(case, activation=ACTIVATIONS["gpt_oss"], bias=True)
    store = layers.load(layers.empty_store(layer, case, bias=True), layers.tensors(layer, case))
    x, ids, weights = layers.batch(layer, 5, top_k=1 if "weight_on_input" in options else 3)
    out = store.experts.forward(x, ids, weights, **options)
    layers.assert_equals_reference(out, layer, x, ids, weights, **options)


def test_two_ranks_add_up_to_the_whole_layer(case):
    layer = layers.random_layer(case, width=128)
    loaded = layers.tensors(layer, case)
    x, ids, weights = layers.batch(layer, 6, dtype=torch.float32)
    halves = [layers.load(layers.empty_store(layer, case, rank=rank, ranks=2), loaded) for rank in range(2)]
    assert [half.missing() for half in halves] == [[], []]
    out = sum(half.experts.forward(x, ids, weights) for half in halves)
    layers.assert_equals_reference(out, layer, x, ids, weights)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("fp8_block") or name == "fp8_block_32_32"])
def test_a_rank_packs_the_bytes_of_its_own_rows_and_columns(name):
    case = CASES[name]
    layer = layers.random_layer(case, width=128)
    x, ids, weights = layers.batch(layer, 4)
    loaded = layers.tensors(layer, case)
    second = layers.load(layers.empty_store(layer, case, rank=1, ranks=2), loaded)
    half = layers.random_layer(case, width=64)  # only for its sizes
    alone = layers.empty_store(half, case)
    layers.load(alone, {key: second_half(case, tensor, *key[1:]) for key, tensor in loaded.items()})
    assert torch.equal(second.experts.forward(x, ids, weights), alone.experts.forward(x, ids, weights))


def second_half(case, tensor, part, what):
    """Of the rows of gate and up, or of the columns of down; a scale or an order that stands for both is left whole."""
    axis = along(case, what, COLUMNS if part == "down" else ROWS)
    if axis is None or tensor.shape[axis] == 1:
        return tensor
    return tensor.chunk(2, dim=axis)[0 if what == ORDER else 1].clone()


def along(case, what, rows_or_columns):
    """The tensor's axis of the matrix' rows or columns, if it has one."""
    if what == GLOBAL:
        return None
    return next((n for n, axis in enumerate(case.format.axes(what)) if axis.along == rows_or_columns), None)


# Width 96 lies within these blocks, and rows of AWQ's words and of a block cannot lie by turns.
STACKED = [name for name in CASES if name not in ("fp8_block_128_128", "fp8_block_24_64")]
BY_TURNS = [name for name in STACKED if name.split("_")[0] in ("bf16", "f16", "mxfp4", "mxfp8", "modelopt", "deepseek") or name == "gptq"]


@pytest.mark.parametrize("interleaved, name", [(False, name) for name in STACKED] + [(True, name) for name in BY_TURNS])
def test_stacked_experts_are_taken_apart(name, interleaved):
    case = CASES[name]
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    store = layers.empty_store(layer, case)
    experts = range(len(layer.weights))
    for what in (what for what in case.format.needs if what != GLOBAL):
        pairs = [(loaded[e, "gate", what], loaded[e, "up", what]) for e in experts]
        rows = along(case, what, ROWS)
        w13 = torch.stack([pair[0] if rows is None else joined(*pair, rows, interleaved) for pair in pairs])
        layers.loader(store, "w13", what, interleaved=interleaved)(None, w13, "w13", shard_id="w13")
        layers.loader(store, "w2", what)(None, torch.stack([loaded[e, "down", what] for e in experts]), "w2", "w2", None)
    layers.load(store, loaded, only=lambda expert, part, what: what == GLOBAL)
    assert store.missing() == []
    x, ids, weights = layers.batch(layer, 4)
    whole = layers.load(layers.empty_store(layer, case), loaded)
    assert torch.equal(store.experts.forward(x, ids, weights), whole.experts.forward(x, ids, weights))


def joined(gate, up, rows, interleaved):
    both = torch.stack([t.view(torch.uint8) if t.element_size() == 1 else t for t in (gate, up)], dim=rows + 1 if interleaved else rows)
    return both.flatten(rows, rows + 1).view(gate.dtype)


def by_turns(gate, up):
    return joined(gate, up, 0, True)


@pytest.mark.parametrize("name, interleaved", [("awq", True), ("fp8_block_32_32", True), ("fp8_block_128_128", False)])
def test_stacked_rows_that_share_a_word_or_a_scale_are_refused(name, interleaved):
    case = CASES[name]
    layer = layers.random_layer(case)
    tensors = layers.tensors(layer, case)
    what = CODES if name == "awq" else SCALES
    w13 = torch.stack([joined(tensors[e, "gate", what], tensors[e, "up", what], along(case, what, ROWS), False) for e in range(4)])
    loader = layers.loader(layers.empty_store(layer, case), "w13", what, interleaved=interleaved)
    assert "rows of gate and up share scales or words" in said_by(loader, None, w13, "w13", shard_id="w13")


# Shapes and ranks whose shares begin inside a block or a group, of rows, of columns or of both.
CUTS = {
    "fp8_block_128_128": (192, 2), "fp8_block_24_64": (192, 2), "fp8_block_1_96": (192, 3), "awq": (192, 3), "gptq_zeros": (192, 3),
    "compressed_int4_channel_zeros": (192, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_ranks_whose_shares_begin_inside_a_block_add_up_to_the_whole_layer(name):
    case, (width, ranks) = CASES[name], CUTS[name]
    layer = layers.random_layer(case, width=width)
    loaded = layers.tensors(layer, case)
    x, ids, weights = layers.batch(layer, 4, dtype=torch.float32)
    shares = [layers.load(layers.empty_store(layer, case, rank=rank, ranks=ranks), loaded) for rank in range(ranks)]
    assert all(share.missing() == [] for share in shares)
    out = sum(share.experts.forward(x, ids, weights) for share in shares)
    layers.assert_equals_reference(out, layer, x, ids, weights)


def test_a_share_that_the_model_code_has_cut_is_taken_as_it_is():
    """gpt-oss hands over every rank's rows of the stacked tensors, in blocks of 32 columns."""
    case = CASES["mxfp4"]
    layer = layers.random_layer(case, width=64)
    loaded = layers.tensors(layer, case)
    store = layers.empty_store(layers.random_layer(case, width=128), case, rank=1, ranks=2)
    for what in case.format.needs:
        w13 = torch.stack([by_turns(loaded[e, "gate", what], loaded[e, "up", what]) for e in range(4)])
        w2 = torch.stack([loaded[e, "down", what] for e in range(4)])
        if what == CODES:
            w13, w2 = (w.unflatten(-1, (-1, 16)) for w in (w13, w2))
        layers.loader(store, "w13", what, interleaved=True)(None, w13, weight_name="w13", shard_id=None, expert_id=None)
        layers.loader(store, "w2", what)(None, w2, weight_name="w2", shard_id=None, expert_id=None)
    x, ids, weights = layers.batch(layer, 4)
    layers.assert_equals_reference(store.experts.forward(x, ids, weights), layer, x, ids, weights)


def test_transposed_and_strided_tensors_pack_like_contiguous_ones():
    case = CASES["bf16"]
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    x, ids, weights = layers.batch(layer, 4)
    plain = layers.load(layers.empty_store(layer, case), loaded).experts.forward(x, ids, weights)
    turned = {key: tensor.T.contiguous().T for key, tensor in loaded.items()}
    wide = {key: torch.cat([tensor, tensor.new_full(tensor.shape, 7)], dim=1)[:, : tensor.shape[1]] for key, tensor in loaded.items()}
    for other in (turned, wide):
        store = layers.load(layers.empty_store(layer, case), other)
        assert torch.equal(store.experts.forward(x, ids, weights), plain)


def test_ids_of_any_integer_type_and_stride_give_the_same_and_foreign_ids_nothing():
    case = CASES["bf16"]
    layer = layers.random_layer(case)
    experts = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case)).experts
    x, ids, weights = layers.batch(layer, 6, top_k=3)
    plain = experts.forward(x, ids, weights)
    assert torch.equal(experts.forward(x, ids.long(), weights), plain)
    assert torch.equal(experts.forward(x, ids.T.contiguous().T, weights.T.contiguous().T), plain)
    assert torch.equal(experts.forward(torch.stack([x, x * 3], 1)[:, 0], torch.cat([ids, ids], 1)[:, :3], weights), plain)
    for foreign in (-1, 4, 9, -(2**31), 2**31 - 1):
        wide = torch.cat([ids, torch.full((6, 2), foreign, dtype=torch.int32)], 1)
        assert torch.equal(experts.forward(x, wide, torch.cat([weights, torch.ones(6, 2)], 1)), plain)
    assert not experts.forward(x, torch.full_like(ids, -1), weights).any()
    assert torch.equal(experts.forward(x, ids, weights.bfloat16()), experts.forward(x, ids, weights.bfloat16().float()))


def test_a_batch_without_tokens_gives_none_back():
    layer = layers.random_layer(CASES["mxfp4"])
    experts = layers.load(layers.empty_store(layer, CASES["mxfp4"]), layers.tensors(layer, CASES["mxfp4"])).experts
    x, ids, weights = layers.batch(layer, 0)
    assert experts.forward(x, ids, weights).shape == (0, layer.hidden)


@pytest.mark.parametrize("exponents", [(-13, -10), (-10, -13)], ids=["up_larger", "gate_larger"])
def test_both_nvfp4_conventions_of_one_expert_give_the_same_bits_when_gate_and_up_differ(exponents):
    multiplies, divides = CASES["modelopt_nvfp4"], CASES["compressed_nvfp4"]
    layer = layers.random_layer(multiplies)
    for parts in layer.weights:
        for part, exponent in zip(("gate", "up", "down"), (*exponents, -9), strict=True):
            matrix = parts[part]
            matrix.values *= 2.0**exponent / matrix.global_scale
            matrix.global_scale = 2.0**exponent
    x, ids, weights = layers.batch(layer, 5)
    x = (x.float() * 64).bfloat16()
    outs = [
        layers.load(layers.empty_store(layer, case), layers.tensors(layer, case)).experts.forward(x, ids, weights)
        for case in (multiplies, divides)
    ]
    assert torch.equal(*outs)
    layers.assert_equals_reference(outs[0], layer, x, ids, weights)


def test_activation_scales_are_not_needed():
    case = CASES["modelopt_nvfp4"]
    layer = layers.random_layer(case)
    store = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case))
    layers.loader(store, "w13", UNUSED)(None, torch.tensor(0.0), "w13_input_scale", "w1", 0)
    assert store.missing() == []


def test_e8m0_scales_of_a_block_are_read_too():
    """DeepSeek's later checkpoints have powers of two, as bytes or as float32."""
    case = CASES["fp8_block_32_32"]
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    powers = {k: torch.exp2(torch.log2(t).round()) if k[2] == SCALES else t for k, t in loaded.items()}
    bytes_of = {k: t.to(torch.float8_e8m0fnu) if k[2] == SCALES else t for k, t in powers.items()}
    x, ids, weights = layers.batch(layer, 3)
    outs = [layers.load(layers.empty_store(layer, case), held).experts.forward(x, ids, weights) for held in (powers, bytes_of)]
    assert torch.equal(*outs) and outs[0].any()


def test_a_channel_scale_may_have_one_axis_or_two():
    case = CASES["fp8_channel"]
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    flat = {k: t.flatten() if k[2] == CHANNEL else t for k, t in loaded.items()}
    x, ids, weights = layers.batch(layer, 3)
    outs = [layers.load(layers.empty_store(layer, case), held).experts.forward(x, ids, weights) for held in (loaded, flat)]
    assert torch.equal(*outs) and outs[0].any()


@pytest.mark.parametrize("rows, factor", [("gate", 0.1), ("up", 0.1)])
def test_gate_and_up_keep_their_own_scale_per_tensor(rows, factor):
    case = CASES["fp8_tensor"]
    layer = layers.random_layer(case)
    for parts in layer.weights:
        parts[rows].values *= factor
        parts[rows].tensors[GLOBAL] = torch.tensor(float(parts[rows].tensors[GLOBAL]) * factor, dtype=torch.float64).float()
    x, ids, weights = layers.batch(layer, 5)
    store = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case))
    layers.assert_equals_reference(store.experts.forward(x, ids, weights), layer, x, ids, weights)


@pytest.mark.parametrize("model", [torch.float16, torch.float32])
def test_float16_weights_stay_float16_unless_the_model_is_bf16(model):
    case = CASES["f16"]
    layer = layers.random_layer(case)
    x, ids, weights = layers.batch(layer, 4, dtype=torch.float32)
    kept = layers.load(layers.empty_store(layer, case, dtype=model), layers.tensors(layer, case))
    layers.assert_equals_reference(kept.experts.forward(x, ids, weights), layer, x, ids, weights)
    rounded = layers.load(layers.empty_store(layer, case, dtype=torch.bfloat16), layers.tensors(layer, case))
    for parts in layer.weights:
        for matrix in parts.values():
            matrix.values = matrix.tensors[CODES].bfloat16().double().numpy()
    layers.assert_equals_reference(rounded.experts.forward(x, ids, weights), layer, x, ids, weights)


def test_bf16_weights_stay_bf16_in_a_float16_model():
    geometry = dict(experts=1, hidden=32, width=32, dtype=torch.float16)
    packing = {stored: formats.Unquantized().packing(formats.Geometry(**geometry, stored=stored_as(stored))) for stored in TYPES}
    assert {stored: found.format for stored, found in packing.items()} == {"bf16": "bf16", "f16": "f16", "f32": "f16", None: "f16"}


TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, None: None}


def stored_as(name):
    return {CODES: TYPES[name]} if name else {}


@pytest.mark.parametrize("spelled", ["uint8", "float8_e8m0fnu", "float32"])
def test_e8m0_scales_mean_the_same_in_every_type(spelled):
    case = CASES["deepseek_mxfp4"]
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    if spelled != "uint8":
        loaded = {
            key: tensor.view(torch.float8_e8m0fnu).to(getattr(torch, spelled)) if key[2] == SCALES else tensor
            for key, tensor in loaded.items()
        }
    x, ids, weights = layers.batch(layer, 3)
    store = layers.load(layers.empty_store(layer, case), loaded)
    layers.assert_equals_reference(store.experts.forward(x, ids, weights), layer, x, ids, weights)


def test_float16_activations_are_as_exact_as_float32_ones(case):
    layer = layers.random_layer(case)
    experts = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case)).experts
    x, ids, weights = layers.batch(layer, 5, dtype=torch.float16)
    out = experts.forward(x, ids, weights)
    assert out.dtype is torch.float16
    assert torch.equal(out, experts.forward(x.float(), ids, weights).to(torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_that_bf16_does_not_hold_are_refused_unless_the_model_is_bf16(dtype):
    case = CASES["bf16"]
    layer = layers.random_layer(case)
    loaded = {key: tensor.to(dtype) for key, tensor in layers.tensors(layer, case).items()}
    store = layers.empty_store(layer, case)
    store.geometry = dataclasses.replace(store.geometry, dtype=torch.float32)
    layers.load(store, loaded)
    assert store.missing() == []
    key = next(iter(loaded))
    loaded[key][0, 0] = 1 + 2**-9
    message = said_by(layers.load, store, loaded)
    assert "bfloat16 does not hold exactly; --dtype bfloat16 rounds them" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wider_checkpoints_are_cast_as_upstream_casts_them(dtype):
    case = CASES["bf16"]
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    store = layers.load(layers.empty_store(layer, case), {key: tensor.to(dtype) for key, tensor in loaded.items()})
    x, ids, weights = layers.batch(layer, 3)
    plain = layers.load(layers.empty_store(layer, case), {key: tensor.to(dtype).bfloat16() for key, tensor in loaded.items()})
    assert torch.equal(store.experts.forward(x, ids, weights), plain.experts.forward(x, ids, weights))


def test_loading_from_many_threads_is_loading(case):
    layer = layers.random_layer(case, experts=16)
    loaded = list(layers.tensors(layer, case).items())
    store = layers.empty_store(layer, case)
    threads = [threading.Thread(target=layers.load, args=(store, dict(loaded[n::6]))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.missing() == []
    x, ids, weights = layers.batch(layer, 8)
    layers.assert_equals_reference(store.experts.forward(x, ids, weights), layer, x, ids, weights)


@pytest.mark.parametrize("model", [None, torch.float32], ids=["usual", "float32"])
def test_a_start_without_a_checkpoint_has_valid_experts(case, model):
    layer = layers.random_layer(case)
    store = layers.empty_store(layer, case, dtype=model)
    store.fill_with_samples(seed=1)
    x, ids, weights = layers.batch(layer, 4)
    out = store.experts.forward(x, ids, weights)
    assert store.missing() == []
    assert out.isfinite().all() and out.any()


def said_by(action, *args, **kwargs) -> str:
    """The one message of a refused action."""
    with pytest.raises(loading.LoadError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


# What can be wrong -------------------------------------------------------------------------------------------------


def refusal(case, what, change, *, part="up") -> str:
    layer = layers.random_layer(case)
    loaded = layers.tensors(layer, case)
    loaded[2, part, what] = change(loaded[2, part, what].clone())
    return said_by(layers.load, layers.empty_store(layer, case), loaded)


def with_byte(value, tensor):
    tensor.view(torch.uint8)[1, 0] = value
    return tensor


def with_number(value, tensor):
    tensor[1, 0] = value
    return tensor


def with_last(value, tensor):
    tensor[..., -1] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "what", "change", "said"),
    [
        ("bf16", CODES, lambda t: with_number(float("nan"), t), "1 of 6144 weights are not valid"),
        ("bf16", CODES, lambda t: with_number(float("-inf"), t), "1 of 6144 weights are not valid"),
        ("bf16", CODES, lambda t: t[:-1], "the shape is [95, 64]; expected [96, 64]"),
        ("bf16", CODES, lambda t: t.T, "the shape is [64, 96]; expected [96, 64]"),
        ("bf16", CODES, lambda t: t.to(torch.float8_e4m3fn), "the type is float8_e4m3fn; expected bfloat16"),
        ("mxfp4", CODES, lambda t: t[:, :-1], "the shape is [96, 31]; expected [96, 32]"),
        ("mxfp4", CODES, lambda t: t.to(torch.int32), "the type is int32; expected uint8"),
        ("mxfp4", SCALES, lambda t: with_byte(255, t), "1 of 192 scales are not valid"),
        ("mxfp4", SCALES, lambda t: t.repeat(1, 2), "the shape is [96, 4]; expected [96, 2]"),
        ("deepseek_mxfp4", SCALES, lambda t: t.float() + 0.5, "must be powers of two"),
        ("modelopt_nvfp4", SCALES, lambda t: with_byte(0x7F, t), "1 of 384 scales are not valid"),
        ("modelopt_nvfp4", SCALES, lambda t: with_byte(0xB8, t), "1 of 384 scales are not valid"),
        ("modelopt_nvfp4", GLOBAL, lambda t: t * 0, "the per-tensor scale is 0.0"),
        ("compressed_nvfp4", GLOBAL, lambda t: t * float("nan"), "the per-tensor scale is nan"),
        ("compressed_nvfp4", GLOBAL, lambda t: t.repeat(2), "has shape [2]; expected one number"),
        ("f16", CODES, lambda t: with_number(float("inf"), t), "1 of 6144 weights are not valid"),
        ("fp8_tensor", CODES, lambda t: with_byte(0x7F, t), "1 of 6144 weights are not valid"),
        ("fp8_tensor", CODES, lambda t: with_byte(0xFF, t), "1 of 6144 weights are not valid"),
        ("fp8_tensor", CODES, lambda t: t.view(torch.uint8), "the type is uint8; expected float8_e4m3fn"),
        ("fp8_tensor", CODES, lambda t: t.to(torch.float8_e5m2), "the type is float8_e5m2; expected float8_e4m3fn"),
        ("fp8_tensor", GLOBAL, lambda t: t * float("inf"), "the per-tensor scale is inf"),
        ("fp8_block_32_32", CODES, lambda t: t[:, :-1], "the shape is [96, 63]; expected [96, 64]"),
        ("fp8_block_32_32", SCALES, lambda t: t[:-1], "the shape is [2, 2]; expected [3, 2]"),
        ("fp8_block_32_32", SCALES, lambda t: with_number(float("nan"), t), "1 of 6 scales are not valid"),
        ("fp8_block_1_96", SCALES, lambda t: with_number(float("-inf"), t), "1 of 96 scales are not valid"),
        ("fp8_block_32_32", SCALES, lambda t: t.to(torch.int32), "the type is int32; expected float32"),
        ("fp8_channel", CHANNEL, lambda t: with_number(float("nan"), t), "1 of 96 scales are not valid"),
        ("fp8_channel", CHANNEL, lambda t: t[:-1], "the shape is [95, 1]; expected [96, 1]"),
        ("mxfp8", SCALES, lambda t: with_byte(255, t), "1 of 192 scales are not valid"),
        ("mxfp8", SCALES, lambda t: t.float(), "the type is float32; expected uint8"),
        ("awq", CODES, lambda t: t[:, :-1], "the shape is [64, 11]; expected [64, 12]"),
        ("awq", CODES, lambda t: t.long(), "the type is int64; expected int32"),
        ("awq", ZEROS, lambda t: t.T, "the shape is [12, 2]; expected [2, 12]"),
        ("awq", SCALES, lambda t: with_number(float("nan"), t), "1 of 192 scales are not valid"),
        ("awq", SCALES, lambda t: t.float() / 3, "float32 scales, where the layer's first ones are float16"),
        ("gptq", CODES, lambda t: t.T, "the shape is [96, 8]; expected [8, 96]"),
        ("gptq_ordered", ORDER, lambda t: t.flip(0), "columns are grouped in another order than their own (act-order)"),
        ("gptq", ORDER, lambda t: t.flip(0), "columns are grouped in another order than their own (act-order)"),
        ("gptq_channel", CHANNEL, lambda t: with_last(float("inf"), t), "1 of 96 scales are not valid"),
        ("gptq_v2", ZEROS, lambda t: t.to(torch.float16), "the type is float16; expected int32"),
        ("compressed_int4", CODES, lambda t: t.view(torch.uint8), "the shape is [96, 32]; expected [96, 8]"),
        ("compressed_int4_zeros", ZEROS, lambda t: t[:, :1], "the shape is [12, 1]; expected [12, 2]"),
    ],
)  # fmt: skip
def test_a_bad_tensor_is_named_by_layer_expert_and_part(name, what, change, said):
    message = refusal(CASES[name], what, change)
    assert said in message
    assert f"{layers.NAME}: expert 2, up, {what}: " in message


def test_zero_points_that_the_kernels_do_not_hold_are_refused(monkeypatch):
    """No format makes any out of 4 bits; one that reads them wrongly must not pass."""
    zeros = formats.Awq.zeros
    monkeypatch.setattr(formats.Awq, "zeros", lambda *given: zeros(*given) + 15)
    case = CASES["awq"]
    layer = layers.random_layer(case)
    message = said_by(layers.load, layers.empty_store(layer, case), layers.tensors(layer, case))
    assert f"{layers.NAME}: expert 0, " in message and " of 192 zero points are not from 0 to 16" in message


def test_a_bad_tensor_is_named_by_file_too(monkeypatch, tmp_path):
    files = loading.Files()
    safetensors.save_file({f"{layers.NAME}.2.up_proj.weight": torch.zeros(1)}, tmp_path / "model-00007.safetensors")
    files.check(tmp_path, tmp_path.glob("*.safetensors"))
    monkeypatch.setattr(loading, "files", files)
    message = refusal(CASES["bf16"], CODES, lambda t: t[:-1])
    assert f"(tensor {layers.NAME}.2.up_proj.weight in model-00007.safetensors)" in message


@pytest.mark.parametrize(
    ("tensor", "part", "what", "found"),
    [
        ("model.layers.3.mlp.experts.7.gate_proj.weight_packed", "gate", CODES, True),
        ("model.layers.3.mlp.experts.17.gate_proj.weight_packed", "gate", CODES, False),
        ("model.layers.13.mlp.experts.7.gate_proj.weight", "gate", CODES, False),
        ("model.layers.3.block_sparse_moe.experts.7.w2.weight", "down", CODES, True),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", "up", CODES, True),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", "up", BIAS, True),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", "up", CODES, False),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale", "up", SCALES, True),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale_2", "up", SCALES, False),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale_2", "up", GLOBAL, True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "up", CODES, False),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale", "up", GLOBAL, True),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale_inv", "up", SCALES, True),
        ("model.layers.3.mlp.experts.7.down_proj.qweight", "down", CODES, True),
        ("model.layers.3.mlp.experts.7.down_proj.qzeros", "down", ZEROS, True),
        ("model.layers.3.mlp.experts.7.down_proj.scales", "down", CHANNEL, True),
        ("model.layers.3.mlp.experts.7.down_proj.g_idx", "down", ORDER, True),
    ],
)
def test_the_file_of_a_part_is_found_by_the_tensors_name(tensor, part, what, found, tmp_path):
    safetensors.save_file({tensor: torch.zeros(1)}, tmp_path / "a.safetensors")
    files = loading.Files()
    files.check(tmp_path, [tmp_path / "a.safetensors"])
    assert files.find(3, 7, part, what) == ((tensor, "a.safetensors") if found else None)


def test_experts_that_do_not_exist_are_refused():
    layer = layers.random_layer(CASES["bf16"])
    store = layers.empty_store(layer, CASES["bf16"])
    w13, w2 = (layers.loader(store, half, CODES) for half in ("w13", "w2"))
    assert "expert 4 does not exist, the layer has 4" in said_by(w13, None, torch.zeros(96, 64), "", "w1", 4)
    assert "[3, 64, 96] does not stack the layer's 4 experts" in said_by(w2, None, torch.zeros(3, 64, 96), "", "w2", None)
    assert "'w9' is no part" in said_by(w2, None, torch.zeros(64, 96), "", "w9", 0)
    assert "'w2' is no part" in said_by(w13, None, torch.zeros(64, 96), "", "w2", 0)


@pytest.mark.parametrize("kind", ["weight_packed", "qweight"])
def test_quantised_experts_that_the_config_does_not_declare_are_called_so(tmp_path, monkeypatch, kind):
    name = f"{layers.NAME}.0.gate_proj.{kind}"
    file = tmp_path / "a.safetensors"
    safetensors.save_file({name: torch.zeros(1, dtype=torch.uint8)}, file)
    monkeypatch.setattr(loading, "files", loading.Files())
    loading.files.check(tmp_path, [file])
    said = [str(loading.missing_error(layers.empty_store(layers.random_layer(CASES[case]), CASES[case]))) for case in ("bf16", "mxfp4")]
    assert said[0].startswith(f"Hybrid MoE: {layers.NAME}: the experts are quantised (tensor {name} in a.safetensors), which config.json")
    assert "the checkpoint has no expert 0 gate codes" in said[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_expert_of_half_the_width_is_no_share_of_a_rank(ranks):
    layer = layers.random_layer(CASES["bf16"], width=128)
    store = layers.empty_store(layer, CASES["bf16"], ranks=ranks)
    message = said_by(layers.loader(store, "w13", CODES), None, torch.zeros(64, 64), "", "w1", 0)
    assert "the shape is [64, 64]; expected [128, 64]" in message


def test_what_never_came_is_listed(case):
    layer = layers.random_layer(case)
    store = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case), only=lambda e, part, what: e != 1)
    message = str(loading.missing_error(store))
    assert f"{layers.NAME}: the checkpoint has no expert 1 gate codes" in message
    more = 3 * len(case.format.needs) - 4
    assert (f"and {more} more" in message) == (more > 0)
    assert all(expert == 1 for expert, _, _ in store.missing())


def test_a_layer_that_serves_takes_no_new_weights():
    case = CASES["bf16"]
    layer = layers.random_layer(case)
    store = layers.load(layers.empty_store(layer, case), layers.tensors(layer, case))
    store.complete = True
    assert "cannot be replaced while serving" in said_by(layers.load, store, layers.tensors(layer, case))


def shards(folder, *, listed=("a", "b"), written=("a", "b")):
    """A checkpoint of one tensor per shard, with an index that lists some shards."""
    for name in written:
        safetensors.save_file({name: torch.arange(1000.0)}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in listed}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(folder.glob("*.safetensors"))


def test_a_whole_checkpoint_passes(tmp_path):
    files = loading.Files()
    files.check(tmp_path, shards(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert files.check(tmp_path, sorted(tmp_path.glob("*.safetensors"))) is None


def test_cut_off_and_missing_shards_are_named_together(tmp_path):
    files = shards(tmp_path, listed=("a", "b", "c"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    message = said_by(loading.Files().check, tmp_path, files)
    assert "a.safetensors" in message and "cut off" in message
    assert "c.safetensors" in message and "missing" in message


def test_an_index_entry_that_another_file_makes_up_for_is_only_stale(tmp_path):
    files = shards(tmp_path)
    index = {"weight_map": {"a": "a.safetensors", "b": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loading.Files().check(tmp_path, files) is None


def test_a_damaged_index_is_named(tmp_path):
    files = shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is damaged" in said_by(loading.Files().check, tmp_path, files)


def test_packing_alone_is_the_time_in_which_at_least_one_thread_packs(monkeypatch):
    clock = iter([1.0, 1.0, 3.0, 4.0, 6.0, 6.0, 9.0, 10.0])
    monkeypatch.setattr(ledger, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    progress = ledger.Progress(every=60)
    progress.expect(4 * 10**9)
    progress.begin()
    with progress.taking.running():  # to 3
        pass
    with progress.packing.running():  # from 4 to 6
        with progress.packing.running():
            pass
    progress.begin()  # changes nothing
    with progress.packing.running():  # from 6 to 9
        pass
    progress.done = 10**9
    assert progress.summary() == (
        "1.00 of 4.00 GB of experts packed in 9.0 s, 0.11 GB/s (packing alone 5.0 s, 0.20 GB/s; the system gave their memory in 2.0 s)"
    )


def test_a_layer_takes_its_memory_once_before_the_first_tensor_is_packed():
    case = CASES["bf16"]
    layer = layers.random_layer(case, experts=2)
    store, calls = layers.empty_store(layer, case), []
    native = store.experts
    monitor = lambda name: lambda *given: (calls.append(name), getattr(native, name)(*given))[1]
    store.experts = types.SimpleNamespace(bytes=native.bytes, take=monitor("take"), pack_codes=monitor("pack_codes"))
    layers.load(store, layers.tensors(layer, case))
    assert calls == ["take"] + ["pack_codes"] * 6


@pytest.mark.parametrize("indexed", [True, False])
def test_the_types_of_codes_and_scales_are_read_from_the_headers_of_each_layer(tmp_path, indexed):
    def tensors(layer, scales):
        prefix = f"model.layers.{layer}.mlp.experts.0.gate_proj"
        return {f"{prefix}.qweight": torch.zeros(1, dtype=torch.int32), f"{prefix}.scales": torch.zeros(1, dtype=scales)}

    held = {"a": tensors(0, torch.float16), "b": tensors(1, torch.bfloat16) | {"model.layers.2.mlp.experts.0.w1.weight": torch.zeros(1)}}
    for name, some in held.items():
        safetensors.save_file(some, tmp_path / f"{name}.safetensors")
    if indexed:
        index = {"weight_map": {tensor: f"{name}.safetensors" for name, some in held.items() for tensor in some}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loading.stored_types(tmp_path, 0) == {SCALES: torch.float16}
    assert loading.stored_types(tmp_path, 1) == {SCALES: torch.bfloat16}
    assert loading.stored_types(tmp_path, 2) == {CODES: torch.float32}
    assert loading.stored_types(tmp_path, 3) == {}


def test_what_the_headers_do_not_tell_is_packed_so_that_any_type_fits():
    case = CASES["gptq_zeros"]
    geometry = formats.Geometry(1, 64, 64)
    assert case.format.packing(geometry).scales == "f32"


@pytest.mark.parametrize(
    ("format", "sizes", "said"),
    [
        (formats.Fp8Block(128, 48), (64, 96, 1), "FP8 blocks of 48 columns are not supported (multiples of 32 are)"),
        (formats.Fp8Block(128, 128), (64, 48, 4), "128 columns and a rank's share of 48 have no multiple of 32 in common, choose another --tp-size"),
        (formats.Mxfp8(), (64, 48, 2), "48 columns are no multiple of the 32 that share a scale, choose another --tp-size"),
        (formats.Gptq(group=128, zero_points=False), (64, 80, 2), "a rank's share of 80 have no multiple of 32 in common, choose another --tp-size"),
        (formats.Gptq(group=128, zero_points=False), (128, 48, 4), "a rank's share of 48 have no multiple of 32 in common, choose another --tp-size"),
        (formats.Gptq(group=48, zero_points=False), (192, 96, 1), "INT4 groups of 48 columns are not supported (multiples of 32 are)"),
        (formats.Awq(group=16, zero_points=True), (64, 32, 2), "INT4 groups of 16 columns are not supported (multiples of 32 are)"),
        (formats.Awq(group=32, zero_points=True), (64, 36, 1), "36 rows do not fill words of 8"),
        (formats.Mxfp8(), (64, 48, 1), "48 columns are no multiple of the 32 that share a scale"),
        (formats.CompressedTensorsInt4(group=-1, zero_points=False), (64, 36, 2), "36 columns do not fill words of 8, choose another --tp-size"),
        (formats.CompressedTensorsInt4(group=-1, zero_points=False), (64, 38, 2), "38 columns do not fill words of 8"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_packed_are_said_before_loading(format, sizes, said):
    hidden, width, ranks = sizes
    (problem,) = format.problems(formats.Geometry(1, hidden, width, 0, ranks))
    assert problem.endswith(said)
    assert format.problems(formats.Geometry(1, 128, 96, 0, 1)) == ([problem] if "are not supported" in said else [])
