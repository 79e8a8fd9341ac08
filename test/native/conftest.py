"""The helpers beside the tests are importable, and their assertions count like the tests' own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("native")
