"""The rule that every test compares something, on tests made for it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

pytest_plugins = "pytester"

CASES = """
import pytest

def test_asserts():
    assert 1 + 1 == 2

def test_counts_by_hand(compared):
    compared()

@pytest.mark.no_count
def test_is_excused():
    pass

def test_compares_nothing():
    pass

def test_only_expects_an_error():
    with pytest.raises(ValueError):
        int("x")

def test_fails():
    assert 1 + 1 == 3
"""


def outcomes(pytester, cases: str):
    """What this project's settings make of ``cases``, in a project of their own."""
    pytester.makefile(".ini", pytest=(ROOT / "pytest.ini").read_text())
    folder = pytester.mkdir("test")
    (folder / "conftest.py").write_text((ROOT / "test/conftest.py").read_text())
    (folder / "test_cases.py").write_text(cases)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


def test_a_test_that_compares_nothing_fails(pytester):
    result = outcomes(pytester, CASES)
    assert result.parseoutcomes() == {"passed": 3, "failed": 3}
    assert sum(line.startswith("this test compared nothing") for line in result.outlines) == 2


def test_no_gpu_is_needed_by_default(pytester):
    result = outcomes(pytester, "import pytest\n@pytest.mark.gpu\ndef test_gpu(): assert 1\ndef test_cpu(): assert 1")
    assert result.parseoutcomes() == {"passed": 1, "deselected": 1}
