"""Shared by all tests: where the package comes from, what this machine can run, and that every test compares something.

Without an installed fork, ``sglang`` is a bare package over the source tree (and over upstream, if that is installed), so
that the pure modules are tested with nothing but pytest.
"""

import importlib.util
import shutil
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # then its tests are not collected either
    hypothesis = None
else:
    # How fast examples are drawn says something about the machine's other guests, nothing about the code.
    hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("shared")

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "sglang-lk"


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


FORK = _installed(DISTRIBUTION)


def _bare_packages() -> None:
    """``sglang`` and ``sglang.srt`` without their ``__init__``: source tree first, then installed upstream."""
    spec = importlib.util.find_spec("sglang")
    upstream = spec.submodule_search_locations if spec else []
    places = [ROOT / "python", *(Path(place).parent for place in upstream)]
    for name in ("sglang", "sglang.srt"):
        folder = Path(*name.split("."))
        package = types.ModuleType(name)
        package.__path__ = [str(path) for path in dict.fromkeys(place / folder for place in places) if path.is_dir()]
        sys.modules[name] = package
    sys.modules["sglang"].srt = sys.modules["sglang.srt"]


sys.path.insert(0, str(ROOT / "python"))
if not FORK:
    _bare_packages()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if shutil.which("nvidia-smi") else "no NVIDIA driver on this machine",
        "upstream": None if FORK else f"{DISTRIBUTION} is not installed (pip install .)",
        "serve": None if FORK else f"{DISTRIBUTION} is not installed (pip install .)",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


# A test that compares nothing fails. pytest counts passing asserts; pytest.raises alone does not say what was raised.
_comparisons = 0


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    global _comparisons
    _comparisons += 1


@pytest.fixture
def compared():
    """Call it after a comparison made by other means than ``assert`` (``numpy.testing`` and the like)."""

    def count(number: int = 1) -> None:
        global _comparisons
        _comparisons += number

    return count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    before = _comparisons
    result = yield
    if _comparisons == before and not item.get_closest_marker("no_count"):
        pytest.fail(
            "this test compared nothing: assert on a value (for pytest.raises, on str(error.value)), "
            "or call the fixture compared()",
            pytrace=False,
        )
    return result
