"""The commands as a person runs them, in a small repository of its own with releases of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from overlay import edits, pins, wheels
from upstream import LAYER, LAYER_TEXT, edit, read_against, wheel

REPOSITORY = Path(__file__).resolve().parents[2]
DRIFTED = LAYER_TEXT.replace("self.size = size", "self.size = size + 1")
RENAMED = LAYER_TEXT.replace("self.quant_method.create_weights(", "self.moe_method.create_weights(")


@pytest.fixture
def repository(tmp_path):
    """A checkout with one edit, read against its one pinned release 0.5.23."""
    root = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "python/overlay", root / "python/overlay", ignore=shutil.ignore_patterns("__pycache__"))
    edits.write(read_against(tmp_path, edit()), folder=root / "python/edits")
    empty = pins.Pins(default="0.5.23", tags={})
    (root / "python/upstream.toml").write_text(pins.format(empty).rstrip("\n") + "\n\n[tags]\n")
    release(root, "0.5.23", LAYER_TEXT)
    assert overlay(root, "sync", "0.5.23").returncode == 0
    return root


def release(root: Path, version: str, text: str) -> None:
    """Publish a release: the same wheel for every Python and machine."""
    folder = root / "wheels"
    folder.mkdir(exist_ok=True)
    made = wheel(folder, version, {"sglang/__init__.py": "", LAYER: text})
    for python in wheels.PYTHONS:
        for machine in wheels.MACHINES:
            name = made.name.replace("cp311", python).replace("x86_64", machine)
            if name != made.name:
                shutil.copyfile(made, folder / name)


def overlay(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    env = {"PATH": "/usr/bin:/bin", "LK_UPSTREAM_WHEELS": str(root / "wheels"), **variables}
    command = [sys.executable, "-m", "overlay", *arguments]
    return subprocess.run(command, cwd=root / "python", env=env, capture_output=True, text=True)


def written(root: Path) -> dict[str, bytes]:
    kept = [path for path in root.rglob("*") if path.is_file() and not {"__pycache__", "wheels"} & set(path.parts)]
    return {str(path): path.read_bytes() for path in kept}


def test_sync_of_an_unchanged_release_pins_it_and_all_that_follows(repository):
    release(repository, "0.5.24", LAYER_TEXT)
    done = overlay(repository, "sync", "0.5.24")
    assert done.stdout.endswith("1 ok of 1 edit — 0.5.24 is pinned as 0.5.24.1\n"), done.stderr
    found = pins.load(repository / "python/upstream.toml")
    assert (found.default, list(found.tags), len(found.tags["0.5.24"].wheels)) == ("0.5.24", ["0.5.24", "0.5.23"], 6)
    assert (repository / "python/upstream-requires-0.5.24.txt").read_text() == "Requires-Dist: numpy\n"
    assert (repository / "python/upstream-LICENSE").read_text() == "Apache\n"
    assert "the same for 0.5.24, 0.5.23." in (repository / "docs/reference/edits.md").read_text()
    assert overlay(repository, "check").returncode == 0


@pytest.mark.parametrize(("text", "code"), [(DRIFTED, "question[scope-moved]"), (RENAMED, "error[anchor-gone]"), ("x = (", "error[does-not-parse]")])
def test_sync_writes_nothing_until_every_edit_is_ok(repository, text, code):
    release(repository, "0.5.24", text)
    before = written(repository)
    done = overlay(repository, "sync", "0.5.24")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{code}: wrap-moe-method  sglang 0.5.23 → 0.5.24\n" in done.stdout
    assert done.stdout.endswith("of 1 edit — nothing written\n")
    assert written(repository) == before


def test_a_moved_edit_is_taken_up_after_accept(repository):
    release(repository, "0.5.24", DRIFTED)
    assert "    +        self.size = size + 1\n" in overlay(repository, "sync", "0.5.24").stdout
    done = overlay(repository, "accept", "wrap-moe-method", "0.5.24")
    assert done.stdout == "wrap-moe-method: read against sglang 0.5.24, FusedMoE.__init__, line 16\n"
    assert overlay(repository, "sync", "0.5.24").returncode == 0
    assert overlay(repository, "check").returncode == 0


def test_a_conflict_cannot_be_accepted(repository):
    release(repository, "0.5.24", RENAMED)
    done = overlay(repository, "accept", "wrap-moe-method", "0.5.24")
    assert done.returncode == 1
    assert done.stderr.startswith("error: a conflict cannot be accepted\n\nerror[anchor-gone]: wrap-moe-method")


def test_sync_refuses_wheels_that_differ_in_an_edited_file(repository):
    release(repository, "0.5.24", LAYER_TEXT)
    other = wheel(repository, "0.5.24", {LAYER: DRIFTED})
    other.rename(repository / "wheels" / other.name.replace("cp311", "cp313"))
    done = overlay(repository, "sync", "0.5.24")
    assert (done.returncode, done.stderr) == (
        1,
        "error: the wheels of 0.5.24 differ in the files we edit: they cannot share one set of edits\n",
    )


def test_check_reports_everything_at_once(repository):
    path = repository / "python/edits" / f"{LAYER}.toml"
    path.write_text(path.read_text().replace("why    =", "why =").replace("2 * size", "3 * size"))
    (repository / "python/upstream-requires-0.5.23.txt").unlink()
    done = overlay(repository, "check")
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.split("\n") if line.startswith("error[")] == [
        "error[form]",
        "error[generated]",
        "error[generated]",
    ]
    assert done.stdout.endswith("\n3 problems\n")
    overlay(repository, "check", "--write")
    assert overlay(repository, "check").stdout.endswith("\n1 problem\n")


def test_diff_writes_patches_that_patch_applies(repository):
    done = overlay(repository, "diff")
    assert done.stdout == f"build/patches/0.5.23/{LAYER}.patch\n"
    target = repository / "upstream" / LAYER
    target.parent.mkdir(parents=True)
    target.write_text(LAYER_TEXT)
    patch = (repository / done.stdout.strip()).read_bytes()
    subprocess.run(["patch", "-p1"], input=patch, cwd=repository / "upstream", check=True, capture_output=True)
    assert "        # lk: wrap-moe-method\n        if size:\n            self.size = 2 * size\n        # lk: end\n" in target.read_text()


def test_a_tree_goes_only_where_there_is_nothing_of_others(repository):
    folder = repository / "mine"
    folder.mkdir()
    (folder / "precious.txt").write_text("x")
    done = overlay(repository, "tree", str(folder))
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {folder} is not empty and was not made by this tool: name another folder\n",
    )
    assert overlay(repository, "tree", str(repository / "new")).returncode == 0
    assert (repository / "new" / LAYER).is_file()


def test_a_tree_of_another_release_replaces_the_first(repository):
    release(repository, "0.5.24", "# New.\n" + LAYER_TEXT)
    overlay(repository, "sync", "0.5.24")
    folder = repository / "new"
    for version, start in (("0.5.23", "class Base"), ("0.5.24", "# New."), ("0.5.23", "class Base")):
        assert overlay(repository, "tree", str(folder), LK_UPSTREAM=version).returncode == 0
        assert (folder / LAYER).read_text().startswith(start)


def test_a_file_whose_last_edit_is_gone_is_upstreams_again_and_the_others_stay(repository):
    folder, edits_of_layer = repository / "new", repository / f"python/edits/{LAYER}.toml"
    kept = edits_of_layer.read_text()
    assert overlay(repository, "tree", str(folder)).returncode == 0
    before = (folder / "sglang/__init__.py").stat().st_mtime_ns
    edits_of_layer.unlink()
    assert overlay(repository, "tree", str(folder)).returncode == 0
    assert (folder / LAYER).read_text() == LAYER_TEXT
    assert json.loads((folder / "sglang/lk-build.json").read_text())["edited"] == {}
    edits_of_layer.write_text(kept)
    assert overlay(repository, "tree", str(folder)).returncode == 0
    assert "# lk: wrap-moe-method" in (folder / LAYER).read_text()
    assert (folder / "sglang/__init__.py").stat().st_mtime_ns == before


def test_a_tree_whose_record_of_edits_is_damaged_is_made_anew(repository):
    folder = repository / "new"
    assert overlay(repository, "tree", str(folder)).returncode == 0
    (folder / "sglang/lk-build.json").write_text("{")
    (repository / f"python/edits/{LAYER}.toml").unlink()
    assert overlay(repository, "tree", str(folder)).returncode == 0
    assert (folder / LAYER).read_text() == LAYER_TEXT


def test_history_judges_each_release_against_the_one_before(repository):
    for version, text in (("0.5.24", LAYER_TEXT), ("0.5.25", DRIFTED), ("0.5.26", RENAMED)):
        release(repository, version, text)
    rows = overlay(repository, "history", "0.5.26", "0.5.23", "0.5.24", "0.5.25").stdout.splitlines()
    assert rows == [
        "| release | wrap-moe-method | `layer.py` lines (changed) |",
        "| --- | --- | --- |",
        "| 0.5.23 | first (line 16) | 21 |",
        "| 0.5.24 | ok (line 16) | 21 (0) |",
        "| 0.5.25 | moved (line 16) | 21 (2) |",
        "| 0.5.26 | conflict: anchor-gone | 21 (4) |",
    ]
