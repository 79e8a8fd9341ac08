"""The TOML files: canonical form, malformed ones named together, budgets."""

import pytest
from overlay import OverlayError, edits
from upstream import edit


def test_the_canonical_form_reads_back_as_written(tmp_path):
    written = [edit(seen={"0.5.22": "sha256:aa", "0.5.23": "sha256:bb"}), edit(id="other", why='Says "why".', within=())]
    edits.write(written, folder=tmp_path)
    assert edits.load(tmp_path) == written
    assert edits.uncanonical(written, folder=tmp_path) == []


def test_a_file_in_another_form_is_named(tmp_path):
    edits.write([edit()], folder=tmp_path)
    path = tmp_path / "sglang/layer.py.toml"
    path.write_text("# A remark.\n" + path.read_text())
    assert edits.uncanonical(edits.load(tmp_path), folder=tmp_path) == ["python/edits/sglang/layer.py.toml"]


def test_every_malformed_edit_is_named_in_one_message(tmp_path):
    wrong = [edit(id="op", op="around"), edit(id="long", text="x = 1\n" * 9), edit(id="twice"), edit(id="twice")]
    edits.write(wrong, folder=tmp_path)
    path = tmp_path / "sglang/layer.py.toml"
    path.write_text(path.read_text() + '\n[[edit]]\nid = "short"\ntexts = ""\n')
    with pytest.raises(OverlayError) as error:
        edits.load(tmp_path)
    lines = str(error.value).split("\n")
    assert [line.split(": ", 2)[1] for line in lines] == ["op", "long", "short", "id twice is used 2 times"]
    assert lines[0].endswith("op = 'around' must be one of before, after, replace")
    assert lines[1].endswith("9 lines of text; at most 8 (move the logic into sglang.srt.lk and call it)")
    assert "`anchor` is missing" in lines[2] and "`texts` is not a field" in lines[2]


def test_the_edits_of_this_repository_are_few_and_short():
    found = edits.load()
    assert len({one.file for one in found}) <= 4
    assert sum(one.line_count + 2 for one in found) <= 30
    assert edits.uncanonical(found) == []
    assert all(one.why and one.retire for one in found)
