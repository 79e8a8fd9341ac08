"""What these tests need and this machine lacks is a reported skip; ``.ci/run`` installs it."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "native")]
import builds  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    try:
        return (yield)
    except builds.Missing as missing:
        pytest.skip(str(missing))
