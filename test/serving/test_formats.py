"""A small model in FP8 and INT4 formats, served and compared with its twin of the same values in BF16, which stock serves.

One format of each way to be read: blocks that end inside, numbers per tensor, turned words, words in columns, zero points,
packed zero points, bytes as exponents. ``matrix.py`` tries all.
"""

import pytest

pytest.importorskip("safetensors", reason="needs what SGLang needs")
pytestmark = pytest.mark.serve

import matrix  # noqa: E402
from checkpoints import FORMATS, write  # noqa: E402

NAMES = [f"qwen3_moe_{grid}" for grid in ("f16", "fp8_block", "fp8_modelopt", "fp8_channel", "mxfp8", "awq", "gptq_zeros", "int4_zeros")]
ROWS = [FORMATS[name] for name in NAMES]


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for row in ROWS:
        write(row, folder / row.name, matrix.TOKENIZER)
        write(FORMATS[row.twin], folder / row.twin, matrix.TOKENIZER)
    return matrix.examine_formats(ROWS, folder, folder, usual=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_checkpoint_says_what_its_twin_says(findings, name):
    assert findings[name]["hybrid"] == {"serves": True}
    found = findings[name]["compared"]
    assert found["with"] == "its twin, by stock"
    assert found["tokens_equal"] and found["tokens_checked"] >= 10
    assert found["median"] < matrix.CLOSE["float32"]
