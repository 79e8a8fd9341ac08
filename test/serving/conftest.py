"""The serving tests' neighbours, the launch scripts, and one recite checkpoint of each form per session."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


@pytest.fixture(scope="session")
def recite(tmp_path_factory) -> dict[str, Path]:
    from launch import recite

    folders = {form: tmp_path_factory.mktemp("recite") / form for form in recite.FORMS}
    for form, folder in folders.items():
        recite.make(form, folder)
    return folders
