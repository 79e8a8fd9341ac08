"""Kernels against the float64 reference, and lane instruction sets against each other, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native import CODINGS, ISAS, LANES, assert_bits_equal, assert_within, build, engine, run

# (experts, hidden, width, top_k, tokens): one group, a cut group, odd sizes, every row-count branch.
EDGES = [
    (4, 32, 16, 2, 1), (4, 64, 16, 1, 2), (3, 33, 17, 2, 3), (2, 127, 31, 2, 4), (2, 128, 129, 1, 5),
    (1, 96, 80, 1, 7), (2, 160, 48, 1, 8), (1, 64, 32, 1, 9), (1, 256, 16, 1, 13), (2, 288, 33, 2, 40),
    (1, 264, 64, 1, 257), (1, 32, 48, 1, 300),
]  # fmt: skip


def inputs(layer, tokens, top_k, rng, low=-1):
    x = reference.to_bf16(rng.standard_normal((tokens, layer.hidden)))
    ids = rng.integers(low, len(layer.weights) + (low < 0), (tokens, top_k)).astype(np.int32)
    return x, ids, rng.random((tokens, top_k)).astype(np.float32)


def check(layer, tokens, top_k, rng, **kwargs):
    """Every instruction set equals the reference within the bound, and lane ones each other bit for bit."""
    x, ids, w = inputs(layer, tokens, top_k, rng)
    truth, bound = layer.forward(reference.bf16_to_f64(x), ids, w.astype(np.float64), **kwargs)
    compare(layer, x, ids, w, truth, bound, **kwargs)


def compare(layer, x, ids, w, truth, bound, **kwargs):
    outs = {isa: run(build(layer, isa), x, ids, w, **kwargs) for isa in ISAS}
    for isa, out in outs.items():
        assert_within(out, truth, bound + np.abs(truth) * 2.0**-22)
        if isa in LANES:
            assert_bits_equal(out, outs[LANES[0]])


@pytest.mark.parametrize("format", CODINGS)
@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_every_lane_isa_equals_the_reference_and_each_other_on_edge_shapes(format, shape):
    experts, hidden, width, top_k, tokens = shape
    rng = np.random.default_rng(7)
    check(reference.random_layer(format, experts, hidden, width, rng), tokens, top_k, rng)


@settings(max_examples=25, deadline=None)
@given(
    format=st.sampled_from(CODINGS), experts=st.integers(1, 5), hidden=st.integers(1, 300), width=st.integers(1, 200),
    top_k=st.integers(1, 4), tokens=st.integers(1, 30), seed=st.integers(0, 2**32),
)  # fmt: skip
@example(format="nvfp4", experts=1, hidden=16, width=16, top_k=1, tokens=1, seed=0)
@example(format="mxfp4", experts=1, hidden=1, width=1, top_k=4, tokens=1, seed=1)
def test_every_lane_isa_equals_the_reference_on_any_shape(format, experts, hidden, width, top_k, tokens, seed):
    rng = np.random.default_rng(seed)
    check(reference.random_layer(format, experts, hidden, width, rng), tokens, top_k, rng)


@pytest.mark.parametrize("activation", [
    reference.Activation("silu"), reference.Activation("silu", limit=0.4), reference.Activation("silu", limit=0.3, limit_after=True),
    reference.Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0), reference.Activation("gelu"),
    reference.Activation("gelu_tanh"), reference.Activation("relu2"),
], ids=lambda a: f"{a.activation}-{a.alpha}-{a.limit}-{a.limit_after}-{a.up_bias}")  # fmt: skip
def test_activations_and_biases_follow_the_reference(activation):
    rng = np.random.default_rng(3)
    check(reference.random_layer("bf16", 4, 128, 64, rng, activation, bias=True), 6, 2, rng, scale=2.5)


def test_a_limit_changes_large_inputs_so_that_a_dropped_limit_is_seen():
    rng = np.random.default_rng(5)
    layer = reference.random_layer("bf16", 2, 64, 32, rng, reference.Activation("silu", limit=10.0))
    x, ids, w = reference.to_bf16(rng.standard_normal((3, 64)) * 50), np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    truth, bound = layer.forward(reference.bf16_to_f64(x), ids, w)
    assert_within(run(build(layer), x, ids, w), truth, bound)
    layer.activation = reference.Activation("silu")
    free, _ = layer.forward(reference.bf16_to_f64(x), ids, w)
    assert np.abs(free - truth).max() > 10 * bound.max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", [
    reference.Activation("silu"), reference.Activation("silu", limit=7.0), reference.Activation("silu", limit=7.0, limit_after=True),
    reference.Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0), reference.Activation("gelu"),
    reference.Activation("gelu_tanh"), reference.Activation("relu2"),
], ids=lambda a: f"{a.activation}-{a.alpha}-{a.limit}-{a.limit_after}-{a.up_bias}")  # fmt: skip
def test_nan_in_a_token_stays_nan_in_its_output_and_reaches_no_other_token(activation, isa):
    rng = np.random.default_rng(13)
    layer = reference.random_layer("bf16", 2, 64, 32, rng, activation)
    x, ids, w = inputs(layer, 3, 2, rng, low=0)
    clean = run(build(layer, isa), x, ids, w)
    x[1, 5] = 0x7FC0
    out = run(build(layer, isa), x, ids, w)
    assert np.isnan(out[1]).all()
    assert_bits_equal(out[[0, 2]], clean[[0, 2]])


def infinite(kind: str, rows: int, hidden: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Activations whose second row holds an infinity and third one of the other sign; as the kernels take them, and in float64."""
    x = rng.standard_normal((rows, hidden)).astype({"f16": np.float16}.get(kind, np.float32))
    x[1, 5], x[2, 7] = np.inf, -np.inf
    if kind != "bf16":
        return x, x.astype(np.float64)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    return bits, reference.bf16_to_f64(bits)


def assert_same_kind(out: np.ndarray, truth: np.ndarray) -> None:
    """NaN where the truth is NaN, infinity of its sign where it is infinite, and finite elsewhere."""
    assert out.shape == truth.shape and out.size
    kinds = lambda a: np.where(np.isnan(a), 2, np.where(np.isinf(a), np.sign(a), 0))
    wrong = np.argwhere(kinds(out) != kinds(truth))
    assert len(wrong) == 0, f"{len(wrong)} differ, the first at {wrong[0]}: {out[tuple(wrong[0])]}, expected {truth[tuple(wrong[0])]}"


# Two terms make such a weight, and infinity times one of them is NaN where that one is zero or of the other sign.
IN_TWO_TERMS = {name for name, c in reference.CODINGS.items() if c.format == "f16" or c.zeros}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("coding", CODINGS)
def test_an_infinite_input_gives_what_arithmetic_gives_in_its_token_alone(coding, isa):
    """One column wide, so that infinity comes out, and NaN where a weight is zero; padded columns beside it make none."""
    rng = np.random.default_rng(17)
    for kind in ("bf16", "f16", "f32"):
        layer = reference.random_layer(coding, 4, 40, 1, rng)
        x, exact = infinite(kind, 4, 40, rng)
        ids, w = np.array([[0, 1], [0, 2], [3, 1], [2, 3]], np.int32), np.ones((4, 2), np.float32)
        with np.errstate(all="ignore"):
            truth, _ = layer.forward(exact, ids, w)
        out = run(build(layer, isa), x, ids, w)
        assert not np.isfinite(truth[1:3]).any() and np.isfinite(truth[[0, 3]]).all()
        if coding in IN_TWO_TERMS:
            assert not np.isfinite(out[1:3]).any()
        else:
            assert_same_kind(out, truth)
        clean = np.where(np.isfinite(exact), x, np.zeros((), x.dtype))
        assert_bits_equal(out[[0, 3]], run(build(layer, isa), clean, ids, w)[[0, 3]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", [
    reference.Activation("silu"), reference.Activation("silu", limit=7.0), reference.Activation("silu", limit=7.0, limit_after=True),
    reference.Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0), reference.Activation("gelu"),
    reference.Activation("gelu_tanh"), reference.Activation("relu2"), reference.Activation("relu2", limit=3.0),
], ids=lambda a: f"{a.activation}-{a.alpha}-{a.limit}-{a.limit_after}-{a.up_bias}")  # fmt: skip
def test_infinity_passes_every_activation_as_the_reference_has_it(activation, isa):
    rng = np.random.default_rng(19)
    for width in (1, 40):
        layer = reference.random_layer("bf16", 2, 40, width, rng, activation)
        for parts in layer.weights:  # positive up and down, and one sign of the gate per expert: sums of one sign
            for part, m in parts.items():
                m.codes &= 0x7FFF
                if part == "gate" and m is layer.weights[1]["gate"]:
                    m.codes |= 0x8000
                m.values = reference.bf16_to_f64(m.codes)
        for kind in ("bf16", "f16", "f32"):
            x, exact = infinite(kind, 4, 40, rng)
            for expert in (0, 1):
                ids, w = np.full((4, 1), expert, np.int32), np.ones((4, 1), np.float32)
                with np.errstate(all="ignore"):
                    truth, _ = layer.forward(exact, ids, w)
                assert_same_kind(run(build(layer, isa), x, ids, w), truth)


@pytest.mark.parametrize("isa", ISAS)
def test_float32_activations_beyond_bf16_are_finite(isa):
    """Both the inputs and what the activation makes of them: their nearest bf16 is infinite."""
    largest = np.float32(3.4e38)
    layer = reference.random_layer("bf16", 1, 32, 16, np.random.default_rng(0), reference.Activation("relu2"), bias=True)
    for part, m in layer.weights[0].items():  # the gate is its bias of 1, so that up comes out, halved
        m.codes[:] = 0
        m.codes[0, 0] = {"gate": 0, "up": 0x3F80, "down": 0x3F00}[part]
        m.values = reference.bf16_to_f64(m.codes)
        layer.biases[0][part][:] = part == "gate"
    x, ids, w = np.zeros((2, 32), np.float32), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
    x[0, 0] = largest
    out = run(build(layer, isa), x, ids, w)
    assert abs(out[0, 0] - largest / 2) <= 2.0**-15 * largest
    out[0, 0] = 0
    assert not out.any()


def test_a_pass_of_a_hundred_thousand_rows_of_one_expert_drops_none():
    layer = reference.random_layer("bf16", 1, 1, 1, np.random.default_rng(0))
    tokens, top_k = 4096, 64
    x, ids = np.full((tokens, 1), 0x3F80, np.uint16), np.zeros((tokens, top_k), np.int32)
    out = run(build(layer), x, ids, np.full((tokens, top_k), 1 / top_k, np.float32))
    one = run(build(layer), x[:1], ids[:1, :1], np.ones((1, 1), np.float32))
    assert_bits_equal(out, np.broadcast_to(out[:1], out.shape))
    assert np.allclose(out[0], one[0], rtol=1e-5)


def test_router_weight_on_the_input_is_not_the_weight_on_the_output():
    rng = np.random.default_rng(11)
    layer = reference.random_layer("bf16", 3, 64, 48, rng)
    check(layer, 5, 1, rng, weight_on_input=True)
    x, ids, w = inputs(layer, 4, 1, rng, low=0)
    a, b = run(build(layer), x, ids, w, weight_on_input=True), run(build(layer), x, ids, w)
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize("format", CODINGS)
def test_results_do_not_depend_on_the_number_of_threads(format):
    rng = np.random.default_rng(13)
    layer = reference.random_layer(format, 6, 192, 112, rng)
    for tokens in (1, 3, 50):
        x, ids, w = inputs(layer, tokens, 3, rng)
        one = run(build(layer, threads=1), x, ids, w)
        for threads in (2, 3, 5, 16):
            assert_bits_equal(run(build(layer, threads=threads), x, ids, w), one)


@pytest.mark.parametrize("format", CODINGS)
def test_a_token_does_not_depend_on_the_batch(format):
    """One order of summation for any number of rows: alone, in a small and in a large batch, the same bits. Matrix
    multipliers keep it where they are asked to."""
    rng = np.random.default_rng(17)
    layer = reference.random_layer(format, 4, 160, 64, rng)
    x, ids, w = inputs(layer, 70, 2, rng, low=0)
    for rows in (x, reference.bf16_to_f64(x).astype(np.float32) * 1.001):
        for isa in ISAS:
            experts = build(layer, isa, made=engine(isa, batch_invariant=isa not in LANES))
            together = run(experts, rows, ids, w)
            for size in (1, 2, 3, 7, 33):
                part = slice(20, 20 + size)
                assert_bits_equal(run(experts, rows[part], ids[part], w[part]), together[part])


@pytest.mark.parametrize("format", CODINGS)
@pytest.mark.parametrize("hidden", [8224, 16416, 32800])
def test_many_rows_of_experts_too_deep_for_the_scratch_follow_the_reference(format, hidden):
    rng = np.random.default_rng(19)
    check(reference.random_layer(format, 1, hidden, 16, rng), 20, 1, rng)


def test_sums_of_activations_that_the_scratch_does_not_hold_are_the_same():
    """Zero points: 257 groups of 300 rows are more sums than are kept, of 20 rows they are not."""
    rng = np.random.default_rng(19)
    layer = reference.random_layer("int4_group32_zeros", 1, 8224, 16, rng)
    x, ids, w = inputs(layer, 300, 1, rng, low=0)
    for isa in ISAS:
        experts = build(layer, isa, made=engine(isa, batch_invariant=isa not in LANES))
        together = run(experts, x, ids, w)
        for part in (slice(0, 20), slice(280, 300)):
            assert_bits_equal(run(experts, x[part], ids[part], w[part]), together[part])


@pytest.mark.parametrize("wide", [np.int32, np.int64])
def test_ids_outside_the_experts_add_nothing(wide):
    rng = np.random.default_rng(19)
    layer = reference.random_layer("bf16", 4, 64, 32, rng)
    experts = build(layer)
    x, ids, w = inputs(layer, 3, 2, rng, low=0)
    strange = np.array([-1, 4, 9, np.iinfo(np.int32).min, 2**31 - 1], wide)
    if wide is np.int64:
        strange = np.append(strange, [2**32, 2**40 + 1, -(2**33)])
    for bad in strange:
        mixed = np.concatenate([ids.astype(wide), np.full((3, 1), bad, wide)], axis=1)
        heavy = np.concatenate([w, np.full((3, 1), 7, np.float32)], axis=1)
        assert_bits_equal(run(experts, x, mixed, heavy), run(experts, x, ids, w))
    assert (run(experts, x, np.full((3, 2), -1, wide), w) == 0).all()


def test_an_empty_batch_returns_at_once():
    layer = reference.random_layer("bf16", 2, 64, 32, np.random.default_rng(0))
    out = run(build(layer), np.zeros((0, 64), np.uint16), np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32))
    assert out.shape == (0, 64)


def test_strided_views_and_other_dtypes_give_the_same_values():
    rng = np.random.default_rng(23)
    layer = reference.random_layer("bf16", 4, 80, 48, rng)
    experts = build(layer)
    x, ids, w = inputs(layer, 5, 2, rng, low=0)
    plain = run(experts, x, ids, w)
    wider = np.zeros((5, 96), np.uint16)
    wider[:, :80] = x
    assert_bits_equal(run(experts, wider[:, :80], ids, w), plain)
    doubled = np.repeat(x, 2, axis=0)[::2]
    assert_bits_equal(run(experts, doubled, np.repeat(ids, 2, axis=0)[::2], np.repeat(w, 2, axis=0)[::2]), plain)
    assert_bits_equal(run(experts, x, ids.astype(np.int64), w), plain)
    assert_bits_equal(run(experts, x, ids, w, out_dtype="bf16"), reference.to_bf16(plain))
    assert_bits_equal(run(experts, x, ids, w, out_dtype="f16"), plain.astype(np.float16))
    halves = reference.bf16_to_f64(x).astype(np.float16)
    assert_bits_equal(run(experts, halves, ids, w), run(experts, halves.astype(np.float32), ids, w))


@pytest.mark.parametrize("isa", ISAS)
def test_float16_results_round_to_nearest_even_over_their_whole_range(isa):
    layer = reference.random_layer("bf16", 1, 64, 32, np.random.default_rng(3))
    x, ids, w = inputs(layer, 64, 1, np.random.default_rng(4), low=0)
    experts = build(layer, isa)
    for scale in (1e-9, 1e-6, 3e-5, 1.0, 500.0, 1e5, 1e7):
        with np.errstate(over="ignore"):
            expected = run(experts, x, ids, w, scale=scale).astype(np.float16)
        assert_bits_equal(run(experts, x, ids, w, scale=scale, out_dtype="f16"), expected)


@pytest.mark.parametrize("format", CODINGS)
@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_float32_activations_keep_sixteen_bits(format, shape):
    experts, hidden, width, top_k, tokens = shape
    rng = np.random.default_rng(37)
    layer = reference.random_layer(format, experts, hidden, width, rng)
    _, ids, w = inputs(layer, tokens, top_k, rng)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    truth, bound = layer.forward(x.astype(np.float64), ids, w.astype(np.float64), step=2.0**-15)
    compare(layer, x, ids, w, truth, bound)


def test_float32_activations_are_far_closer_than_bf16_ones():
    rng = np.random.default_rng(41)
    layer = reference.random_layer("mxfp4", 4, 256, 128, rng)
    _, ids, w = inputs(layer, 12, 2, rng, low=0)
    x = rng.standard_normal((12, 256)).astype(np.float32)
    truth, _ = layer.forward(x.astype(np.float64), ids, w.astype(np.float64))
    fine = np.abs(run(build(layer), x, ids, w) - truth).max()
    coarse = np.abs(run(build(layer), reference.to_bf16(x), ids, w) - truth).max()
    assert 0 < fine < coarse / 50


def test_a_batch_beyond_one_pass_equals_its_parts():
    rng = np.random.default_rng(29)
    layer = reference.random_layer("bf16", 2, 32, 16, rng)
    experts = build(layer)
    x, ids, w = inputs(layer, 4096 + 300, 1, rng, low=0)
    whole = run(experts, x, ids, w)
    assert_bits_equal(whole[:4096], run(experts, x[:4096], ids[:4096], w[:4096]))
    assert_bits_equal(whole[4096:], run(experts, x[4096:], ids[4096:], w[4096:]))


E2M1_CODES = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), 2)
IDENTITY = {"f16": 0x3C00, "fp8": 0x38, "mxfp8": 0x38, "mxfp4": 2, "nvfp4": 2, "int4": 9}  # the code of 1.0
ONE = {"mxfp4": 127, "mxfp8": 127, "nvfp4": 0x38}  # the scale of 1.0
WIDE = 32


@pytest.mark.parametrize("isa", ISAS)
def test_every_nvfp4_scale_and_code_decodes_exactly(isa):
    scales = np.arange(0x7F, dtype=np.uint8)[:, None].repeat(2, 1)  # all but NaN
    codes = np.tile(E2M1_CODES, (len(scales), 1))
    check_decoding("nvfp4", isa, codes, reference.e2m1_to_f64(codes) * reference.e4m3_to_f64(scales[:, :1]), scales)


@pytest.mark.parametrize("isa", ISAS)
def test_every_mxfp4_scale_and_code_decodes_exactly(isa):
    """Scales whose products stay normal floats in bf16; the extremes overflow or vanish by definition."""
    scales = np.arange(8, 248, dtype=np.uint8)[:, None]
    codes = np.tile(E2M1_CODES, (len(scales), 1))
    check_decoding("mxfp4", isa, codes, reference.e2m1_to_f64(codes) * 2.0 ** (scales.astype(np.float64) - 127), scales)


def fp8_codes():
    codes = np.arange(256, dtype=np.uint8).reshape(8, WIDE)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


@pytest.mark.parametrize("isa", ISAS)
def test_every_fp8_code_decodes_exactly(isa):
    check_decoding("fp8", isa, fp8_codes(), reference.e4m3_to_f64(fp8_codes()))


@pytest.mark.parametrize("isa", ISAS)
def test_every_mxfp8_scale_and_code_decodes_exactly(isa):
    scales = np.repeat(np.arange(20, 236, dtype=np.uint8), 8)[:, None]
    codes = np.tile(fp8_codes(), (216, 1))
    check_decoding("mxfp8", isa, codes, reference.e4m3_to_f64(codes) * 2.0 ** (scales.astype(np.float64) - 127), scales)


@pytest.mark.parametrize("isa", ISAS)
def test_every_int4_code_and_zero_point_decodes_exactly(isa):
    zeros = np.arange(17, dtype=np.uint8)[:, None]
    codes = np.tile(E2M1_CODES, (17, 1))
    scales = np.full((17, 1), 0.125, np.float16)
    check_decoding("int4_group32_zeros", isa, codes, (reference.nibbles(codes) - zeros.astype(np.float64)) / 8, scales, zeros)


@pytest.mark.parametrize("isa", ISAS)
def test_every_finite_f16_value_is_kept_exactly(isa):
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(-1, WIDE)
    check_decoding("f16", isa, values.view(np.uint16), values.astype(np.float64))


def identity(coding) -> reference.Matrix:
    codes = np.eye(WIDE, dtype=np.uint16) * IDENTITY[coding.format]
    if coding.format == "int4":
        codes = np.where(codes == 0, 8, codes)
    if coding.format != "f16":
        codes = codes.astype(np.uint8)
    if coding.format in ("mxfp4", "nvfp4", "int4"):
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    groups = WIDE // coding.k_of_a_scale if coding.k_of_a_scale else 0
    scales = np.full((WIDE, groups), ONE.get(coding.format, 1), np.uint8 if coding.format in ONE else np.float16) if groups else None
    return reference.Matrix(codes, np.eye(WIDE), scales, zeros=np.full((WIDE, 1), 8, np.uint8) if coding.zeros else None)


def check_decoding(name, isa, codes, values, scales=None, zeros=None):
    """Reads rows of WIDE weights back: relu2 of a gate fixed at 1 by its bias passes ``up`` through, and ``down`` is
    the identity. Float32 activations keep 16 bits of the intermediate, so every code is exact."""
    coding = reference.CODINGS[name]
    rows, one = len(values), identity(coding)
    gate = reference.Matrix(np.full_like(one.codes, 0x88 if coding.format == "int4" else 0), np.zeros((WIDE, WIDE)), one.scales, zeros=one.zeros)
    unit, nothing = np.ones(WIDE, np.float32), np.zeros(WIDE, np.float32)
    weights, truth = [], []
    for r in range(0, rows, WIDE):
        at = (np.arange(WIDE) + r) % rows
        part = lambda array: None if array is None else array[at]
        weights.append({"gate": gate, "up": reference.Matrix(codes[at], values[at], part(scales), zeros=part(zeros)), "down": one})
        truth.append(values[at].T)
    biases = [{"gate": unit, "up": nothing, "down": nothing}] * len(weights)
    experts = build(reference.Layer(coding, WIDE, WIDE, weights, reference.Activation("relu2"), biases), isa)
    x, w = np.eye(WIDE, dtype=np.float32), np.ones((WIDE, 1), np.float32)
    for e, expected in enumerate(truth):
        ids = np.full((WIDE, 1), e, np.int32)
        assert (run(experts, x, ids, w) == expected.astype(np.float32)).all(), e
        assert (run(experts, x[5:6], ids[:1], w[:1]) == expected[5:6].astype(np.float32)).all(), e
