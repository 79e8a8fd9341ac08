"""The torch forms of upstream's GPU-only helpers, against float64."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang.srt.lk import cpu_models  # noqa: E402

ROWS, Q, K = 5, 48, 16


def draw(*shape: int, seed: int = 1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gated_shared_expert_is_added_in_place():
    hidden, gate, shared, final = draw(ROWS, Q), draw(Q, seed=2), draw(ROWS, Q, seed=3), draw(ROWS, Q, seed=4)
    out = final.bfloat16()
    cpu_models.gated_add(hidden.bfloat16(), gate.bfloat16(), shared.bfloat16(), out)
    h, g, s, f = (x.bfloat16().double() for x in (hidden, gate, shared, final))
    expected = f + torch.sigmoid(h @ g)[:, None] * s
    assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@pytest.mark.parametrize("ranks", [1, 2])
def test_queries_and_keys_are_normalised_over_the_columns_of_all_ranks(ranks):
    q, k, wq, wk = draw(ROWS, Q), draw(ROWS, K, seed=2), draw(Q, seed=3), draw(K, seed=4)
    shards = [(q[:, i::ranks], k[:, i::ranks], wq[i::ranks], wk[i::ranks]) for i in range(ranks)]
    squares = sum(cpu_models.squares_of_both(a, b) for a, b, _, _ in shards)
    for a, b, wa, wb in shards:
        found = cpu_models.normalise_both(a.float(), b.float(), wa, wb, squares, ranks, eps=1e-6)
        for x, w, whole, out in ((a, wa, q, found[0]), (b, wb, k, found[1])):
            expected = x * w * torch.rsqrt((whole**2).mean(-1, keepdim=True) + 1e-6)
            assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_weight_and_gives_nothing(window):
    heads, kv_heads, rows, width = 4, 2, 7, 8
    q, k, v = (draw(1, h, rows, width, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    sinks = draw(heads, seed=9)
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    options = dict(is_causal=True) if window is None else dict(attn_mask=(seen := seen.triu(1 - window)))
    found = cpu_models.sink_attention(q, k, v, sinks, scale=0.3, enable_gqa=True, **options)
    for head in range(heads):
        scores = (q[0, head] @ k[0, head // 2].T * 0.3).masked_fill(~seen, float("-inf"))
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks[head].exp())
        assert (found[0, head] - weights @ v[0, head // 2]).abs().max() < 1e-5


def test_a_helper_that_upstream_renamed_is_named(monkeypatch):
    monkeypatch.setattr(cpu_models, "on_cpu", lambda: True)
    module = SimpleNamespace(__name__="sglang.srt.models.minimax_m2", rms_sumsq_serial=None)
    with pytest.raises(AttributeError) as error:
        cpu_models.normalise_queries_and_keys(module)
    assert "sglang.srt.models.minimax_m2 has no rms_apply_serial" in str(error.value)
    assert module.rms_sumsq_serial is None
