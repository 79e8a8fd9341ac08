"""Stock SGLang beside ours, over ours, or removed again: each said with the way out. On made-up folders."""

import json
import re
import sys
from pathlib import Path

import pytest
from overlay.wheels import sha256
from sglang.srt.lk import install_check

INIT = "sglang/__init__.py"
OURS = "# lk: check-environment\n"


class Extension:
    ABI = install_check.ABI


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A site-packages folder with a whole sglang-lk in it, first on the path."""
    package = tmp_path / "sglang"
    package.mkdir()
    (tmp_path / INIT).write_text(OURS)
    stamp = {"version": "0.5.23.1", "edited": {INIT: sha256(OURS.encode())}}
    (package / install_check.STAMP).write_text(json.dumps(stamp))
    distribution(tmp_path, "sglang-lk", "0.5.23.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, install_check.EXTENSION, Extension)
    return tmp_path


def distribution(folder, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


def test_a_whole_installation_has_no_problem(folder):
    assert install_check.problems() == []


def test_stock_beside_ours_is_named(folder):
    distribution(folder, "sglang", "0.5.23")
    (said,) = install_check.problems()
    assert said.startswith(f"stock sglang 0.5.23 is installed in {folder} beside sglang-lk 0.5.23.1")
    assert said.endswith(install_check.REMEDY)


def test_stock_over_ours_is_named_by_its_files(folder):
    (folder / INIT).write_text('"""SGLang public API."""\n')
    (said,) = install_check.problems()
    assert said.startswith(f"{INIT} in {folder}: not as sglang-lk 0.5.23.1 installed")


def test_what_is_left_after_stock_was_removed_is_named(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(folder)])
    (folder / INIT).unlink()
    (said,) = install_check.problems()
    assert said.startswith(f"{INIT} in {folder}: not as sglang-lk 0.5.23.1 installed")


def test_stock_alone_is_named(folder):
    (folder / "sglang" / install_check.STAMP).unlink()
    assert install_check.problems() == [f"{folder / 'sglang'} is stock SGLang, not a build of sglang-lk: {install_check.REMEDY}"]


def test_metadata_of_another_version_is_named(folder):
    (folder / "sglang_lk-0.5.23.1.dist-info").rename(folder / "old")
    distribution(folder, "sglang-lk", "0.5.22.1")
    (said,) = install_check.problems()
    assert said.startswith(f"sglang-lk 0.5.22.1 is installed in {folder}, but its files are of 0.5.23.1")


def test_kernels_of_another_abi_are_named(folder, monkeypatch):
    monkeypatch.setattr(Extension, "ABI", 99)
    (said,) = install_check.problems()
    assert said.startswith(f"the kernels (sgl_kernel_ext) have ABI 99 and this package needs {install_check.ABI}")


def test_all_problems_come_together(folder, monkeypatch):
    distribution(folder, "sglang", "0.5.22")
    (folder / INIT).write_text("")
    monkeypatch.setitem(sys.modules, install_check.EXTENSION, None)
    said = install_check.problems()
    assert len(said) == 3 and said[2].startswith("the kernels (sgl_kernel_ext) do not load (")


def test_a_stock_distribution_elsewhere_on_the_path_is_no_problem(folder, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    distribution(other, "sglang", "0.5.23")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    assert install_check.problems() == []


def test_the_abi_is_the_same_number_wherever_it_is_written():
    root = Path(__file__).resolve().parents[2]
    written = {
        "python/sglang/srt/lk/install_check.py": r"^ABI = (\d+)$",
        "sgl-kernel-ext/bind.cpp": r"\bkAbi = (\d+);",
    }
    found = {file: re.findall(pattern, (root / file).read_text(), re.MULTILINE) for file, pattern in written.items()}
    assert found == dict.fromkeys(written, [str(install_check.ABI)])
