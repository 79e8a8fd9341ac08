"""Three outcomes, all edits tried, all problems reported in the words of the golden files."""

from pathlib import Path

import pytest
from overlay import report, source
from upstream import LAYER, LAYER_TEXT, edit, judge, read_against

GOLDEN = Path(__file__).parent / "golden"

RENAMED = LAYER_TEXT.replace("self.quant_method.create_weights(", "self.moe_method.create_weights(")
DOUBLED = LAYER_TEXT.replace("self.quant_method = None", "self.quant_method.create_weights(\n        )")
DRIFTED = LAYER_TEXT.replace("self.size = size", "self.size = size + 1")
CLASS_RENAMED = LAYER_TEXT.replace("class FusedMoE(", "class FusedExperts(")
NEWER = LAYER_TEXT.replace("return x", "return x +")

CASES = {
    "file-gone": (None, {}),
    "scope-gone": (CLASS_RENAMED, {}),
    "scope-twice": (LAYER_TEXT, {"within": ("def __init__(",)}),
    "anchor-gone": (RENAMED, {}),
    "anchor-twice": (DOUBLED, {}),
    "does-not-parse": (NEWER, {}),
    "does-not-compile": (LAYER_TEXT, {"text": "break"}),
    "scope-moved": (DRIFTED, {}),
}


def test_an_unchanged_scope_is_ok_and_the_result_compiles(tmp_path):
    (read,) = read_against(tmp_path, edit())
    outcomes, texts = judge(tmp_path, "# A new first line.\n" + LAYER_TEXT, read)
    assert [o.kind for o in outcomes] == ["ok"]
    assert source.strip(texts[LAYER]) == "# A new first line.\n" + LAYER_TEXT


def test_a_change_outside_the_scope_asks_nothing(tmp_path):
    (read,) = read_against(tmp_path, edit())
    outcomes, _ = judge(tmp_path, LAYER_TEXT.replace("return x", "return x + 1"), read)
    assert [o.kind for o in outcomes] == ["ok"]


@pytest.mark.parametrize("code", CASES)
def test_every_message_reads_as_its_golden_file(tmp_path, code):
    text, changes = CASES[code]
    (read,) = [edit(**{**vars(e), **changes}) for e in read_against(tmp_path, edit())]
    outcomes, texts = judge(tmp_path, text, read)
    before = judge(tmp_path, LAYER_TEXT, read, version="0.5.23")[0][0] if code == "scope-moved" else None
    said = report.outcome(found=outcomes[0], base="0.5.23", before=before)
    said += "\n\n" + report.summary(outcomes=outcomes, ending="nothing written") + "\n"
    assert outcomes[0].code == code
    assert said == (GOLDEN / f"{code}.txt").read_text(encoding="utf-8")
    assert (LAYER in texts) == (code == "scope-moved")


def test_every_code_has_a_hint_and_a_golden_file():
    assert set(CASES) == set(report.HINTS) == {path.stem for path in GOLDEN.glob("*.txt")}


def test_one_conflict_hides_no_other(tmp_path):
    reads = read_against(tmp_path, edit(), edit(id="second", anchor="self.size = size"), edit(id="third", within=(), anchor="return x"))
    outcomes, texts = judge(tmp_path, RENAMED.replace("return x", "return y"), *reads)
    assert [(o.edit.id, o.kind, o.code) for o in outcomes] == [
        ("wrap-moe-method", "conflict", "anchor-gone"),
        ("second", "moved", "scope-moved"),
        ("third", "conflict", "anchor-gone"),
    ]
    assert texts == {}
    assert report.summary(outcomes=outcomes, ending="nothing written") == "2 conflicts, 1 moved of 3 edits — nothing written"


def test_edits_at_one_line_keep_the_order_of_the_file(tmp_path):
    at = {"within": (), "anchor": "self.size = size"}
    edits = [edit(id=name, op=op, text=f'"{name}"', **at) for name, op in (("c", "after"), ("a", "before"), ("d", "after"), ("b", "before"))]
    _, texts = judge(tmp_path, LAYER_TEXT, *edits)
    order = [line.strip() for line in texts[LAYER].split("\n") if line.strip() in ('"a"', '"b"', '"c"', '"d"', "self.size = size")]
    assert order == ['"a"', '"b"', "self.size = size", '"c"', '"d"']
    assert source.strip(texts[LAYER]) == LAYER_TEXT
