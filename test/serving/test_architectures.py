"""Other architectures than the recite model's, small and random: served by stock and by hybrid, and compared.

All rows share two processes (``engines.Host``), since the imports are what takes time. ``matrix.py`` tries every architecture.
"""

import pytest

pytest.importorskip("safetensors", reason="needs what SGLang needs")
pytestmark = pytest.mark.serve

import matrix  # noqa: E402
from checkpoints import ARCHITECTURES, write  # noqa: E402

# What each adds: names of its experts and a softmax over all logits; a dense first layer, correction biases and a routed
# scale; biases, interleaved rows and sinks; the twin of another row in four bits; latent attention and expert groups.
SERVED_BY_STOCK = ("mixtral", "glm4_moe")
CURED = ("gpt_oss_mxfp4", "qwen3_moe_nvfp4", "deepseek_v3")
ROWS = [ARCHITECTURES[name] for name in ("qwen3_moe", "gpt_oss", *SERVED_BY_STOCK, *CURED)]


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for row in ROWS:
        write(row, folder / row.name, matrix.TOKENIZER)
    return matrix.examine(ROWS, folder, folder, usual=False)


@pytest.mark.parametrize("name", SERVED_BY_STOCK)
def test_hybrid_says_what_stock_says(findings, name):
    found = findings[name]["compared"]
    assert found["with"] == "stock"
    assert found["tokens_equal"] and found["tokens_checked"] >= 10
    assert found["median"] < matrix.CLOSE[matrix.kind(ARCHITECTURES[name])]


@pytest.mark.parametrize("name", ("qwen3_moe_nvfp4", "gpt_oss_mxfp4"))
def test_four_bits_say_what_their_bf16_twin_says(findings, name):
    found = findings[name]["compared"]
    assert found["with"] == "its BF16 twin"
    assert found["tokens_equal"] and found["tokens_checked"] >= 10
    assert found["median"] < matrix.CLOSE[matrix.kind(ARCHITECTURES[name])]


def test_what_stock_cannot_serve_agrees_with_transformers(findings):
    found = findings["deepseek_v3"]["compared"]
    assert not findings["deepseek_v3"]["stock"]["serves"]
    assert found["with"] == "transformers"
    assert found["median"] < matrix.CLOSE["float32"]
