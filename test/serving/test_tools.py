"""The parts of the serving tests that need no server: four-bit values, made-up weights, error reasons, and the table."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import checkpoints  # noqa: E402
import engines  # noqa: E402
import fourbit  # noqa: E402
import matrix  # noqa: E402


@pytest.mark.parametrize("grid", fourbit.GROUP)
def test_snapped_values_are_what_the_codes_decode_to_and_exact_in_bf16(grid):
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(3))
    packed, scales = fourbit.encode(values, grid)
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(values.shape)
    wide = torch.exp2(scales.float() - 127) if grid == "mxfp4" else scales.float()
    decoded = fourbit.LEVELS[(codes & 7).long()] * (1 - 2.0 * (codes >= 8)) * wide.repeat_interleave(fourbit.GROUP[grid], -1)
    snapped = fourbit.snap(values, grid)
    assert torch.equal(snapped, decoded)
    assert torch.equal(snapped.bfloat16().float(), snapped)
    assert (snapped - values).abs().mean() < 0.15 * values.abs().mean()


def test_values_depend_on_the_name_alone_and_rows_differ():
    row = checkpoints.ARCHITECTURES["qwen3_moe"]
    like = torch.empty(16, 32, dtype=torch.bfloat16)
    first, again, other = (
        checkpoints._values(f"model.layers.0.mlp.experts.{e}.up_proj.weight", like, row) for e in (0, 0, 1)
    )  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(values) for values in first.tolist()}) == 16


def test_a_log_is_reduced_to_the_innermost_error_and_its_place_in_sglang():
    log = (
        "[12:00] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/site-packages/sglang/srt/models/a.py", line 7, in forward\n'
        '  File "/x/site-packages/torch/b.py", line 9, in call\n'
        "ValueError: no such thing\n"
        "[12:01] Received sigquit\n"
    )
    assert engines.reason(log) == "ValueError: no such thing (at sglang/srt/models/a.py:7 forward)"


def test_a_refusal_of_ours_is_the_reason():
    assert engines.reason("[12:00] starting\n[12:01] Hybrid MoE: layer 3 is not whole\n[12:02] bye\n") == "Hybrid MoE: layer 3 is not whole"


def test_tokens_are_compared_up_to_the_first_tie():
    other = dict(tokens=[[1, 2, 3]], gaps=[[1.0, 0.1, 1.0]], scored=[[-1.0, -2.0]])
    same_start = dict(tokens=[[1, 9, 9]], scored=[[-1.0, -2.5]])
    assert matrix.compare(same_start, other, 0.25) == dict(tokens_equal=True, tokens_checked=1, median=0.25, p95=0.5, worst=0.5)
    assert not matrix.compare(dict(tokens=[[9, 2, 3]], scored=[[-1.0, -2.0]]), other, 0.25)["tokens_equal"]


def test_every_architecture_and_format_has_its_row_in_the_table_made_from_the_results():
    findings = json.loads(matrix.RESULTS.read_text())
    assert list(findings) == [*checkpoints.ARCHITECTURES, *(name for name in checkpoints.FORMATS if not name.endswith("_twin"))]
    assert matrix.TABLE.read_text() == matrix.table(findings)


def test_no_reason_in_the_table_is_a_bare_error():
    errors = [side["error"] for row in json.loads(matrix.RESULTS.read_text()).values() for side in (row["stock"], row["hybrid"]) if "error" in side]
    assert errors
    assert [error for error in errors if matrix.explain(error) == f"`{error}`"] == []
