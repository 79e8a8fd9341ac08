"""Off is stock: a wheel's package with our edits is upstream's, byte for byte, outside the tagged blocks."""

import json
import zipfile

import pytest
from overlay import edits, pins, source, tree, wheels
from overlay.commands import main

pytestmark = pytest.mark.upstream
TAGS = list(pins.load().tags)


@pytest.fixture(scope="module", params=TAGS)
def made(request, tmp_path_factory):
    """The edited tree of one release, and the wheel it was made from."""
    pinned, version = pins.load(), request.param
    folder = tmp_path_factory.mktemp(version)
    tree.build(pins=pinned, tag=pinned.tags[version], edits=edits.load(), folder=folder)
    yield version, folder, wheels.get(pins=pinned, version=version)


def test_every_file_is_upstreams_outside_tagged_blocks(made):
    version, folder, path = made
    edited = {one.file for one in edits.load()}
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if name.startswith("sglang/") and not name.endswith("/")}
        found = {file.relative_to(folder).as_posix() for file in (folder / "sglang").rglob("*") if file.is_file()}
        assert found - names == {tree.STAMP} and names <= found
        differ = {name for name in names if (folder / name).read_bytes() != archive.read(name)}
        assert differ == edited
        for name in edited:
            assert source.strip((folder / name).read_text()).encode() == archive.read(name)


def test_each_edit_is_there_once_and_the_result_compiles(made):
    _, folder, _ = made
    for one in edits.load():
        text = (folder / one.file).read_text()
        assert text.count(f"# lk: {one.id}\n") == 1
        compile(text, one.file, "exec")


def test_the_stamp_says_what_was_built(made):
    version, folder, _ = made
    stamp = json.loads((folder / tree.STAMP).read_text())
    assert (stamp["upstream"], stamp["version"]) == (version, pins.load().tags[version].own_version)
    assert stamp["edited"] == {one.file: wheels.sha256((folder / one.file).read_bytes()) for one in edits.load()}


def test_a_tree_made_again_touches_nothing(made):
    version, folder, _ = made
    pinned = pins.load()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    tree.build(pins=pinned, tag=pinned.tags[version], edits=edits.load(), folder=folder)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()} == before


def test_all_pinned_releases_pass_the_check(capsys):
    status = main(["check"])
    said = capsys.readouterr().out
    assert (status, said.count("3 ok of 3 edits — the result compiles")) == (0, len(TAGS)), said
