"""Tests that need a CUDA device: `pytest -m gpu test/gpu`. The helpers of the other folders are importable."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / folder) for folder in ("lk", "native"))]
pytest.register_assert_rewrite("layers")


@pytest.fixture(autouse=True)
def _no_error_stays_behind():
    import torch

    yield
    torch.cuda.synchronize()
