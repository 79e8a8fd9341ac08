"""Scopes, anchors, insertion and its undoing, on text alone."""

import pytest
from overlay import source
from upstream import LAYER_TEXT

WITHIN = ("class FusedMoE(", "def __init__(")
LINES = LAYER_TEXT.split("\n")


def line(text: str) -> int:
    return next(n for n, found in enumerate(LINES) if found.strip() == text)


def test_a_scope_is_the_whole_function_whatever_its_head_looks_like():
    scope = source.find_scope(text=LAYER_TEXT, within=WITHIN)
    assert scope.name == "FusedMoE.__init__"
    assert (scope.first, scope.last) == (line("def __init__("), line("def forward(self, x):") - 1)


def test_without_within_the_scope_is_the_file():
    scope = source.find_scope(text=LAYER_TEXT, within=())
    assert (scope.name, scope.first, scope.last) == ("the file", 0, len(LINES))


def test_an_ambiguous_scope_is_refused_with_its_lines():
    with pytest.raises(source.NotFound) as error:
        source.find_scope(text=LAYER_TEXT, within=("def __init__(",))
    assert (error.value.code, error.value.lines) == ("scope-twice", [1, 8])


def test_an_anchor_is_a_whole_line_inside_its_scope():
    scope = source.find_scope(text=LAYER_TEXT, within=WITHIN)
    at = source.find_anchor(text=LAYER_TEXT, scope=scope, anchor="self.quant_method.create_weights(")
    assert LINES[at] == "        self.quant_method.create_weights("
    with pytest.raises(source.NotFound) as error:
        source.find_anchor(text=LAYER_TEXT, scope=scope, anchor="self.quant_method")
    assert error.value.code == "anchor-gone"


@pytest.mark.parametrize("op", ["before", "after", "replace"])
def test_every_insertion_is_tagged_indented_and_undone_to_the_byte(op):
    at = line("self.size = size")
    text = source.insert(text=LAYER_TEXT, at=at, op=op, id="x", added="if size:\n\n    size = 3\n")
    assert "        # lk: x\n" in text and "        # lk: end\n" in text
    assert "        if size:\n\n            size = 3\n" in text
    assert source.strip(text) == LAYER_TEXT
    compile(text, "layer.py", "exec")


def test_the_ops_put_the_block_where_they_say():
    at = line("self.size = size")
    lines = {
        op: [found.strip() for found in source.insert(text=LAYER_TEXT, at=at, op=op, id="x", added="pass").split("\n")]
        for op in ("before", "after", "replace")
    }
    assert lines["before"][at : at + 4] == ["# lk: x", "pass", "# lk: end", "self.size = size"]
    assert lines["after"][at : at + 4] == ["self.size = size", "# lk: x", "pass", "# lk: end"]
    assert lines["replace"][at : at + 4] == ["# lk: x", "# lk: was self.size = size", "pass", "# lk: end"]


def test_the_nearest_line_is_looked_for_in_the_scope_first_and_then_anywhere():
    scope = source.find_scope(text=LAYER_TEXT, within=WITHIN)
    near = source.nearest(text=LAYER_TEXT, scope=scope, wanted="self.method.create_weights(")
    assert near == line("self.quant_method.create_weights(")
    scope = source.find_scope(text=LAYER_TEXT, within=("class FusedMoE(", "def forward("))
    near = source.nearest(text=LAYER_TEXT, scope=scope, wanted="self.create_weights(2)")
    assert source.enclosing(text=LAYER_TEXT, line=near) == "Base.__init__"
    assert source.nearest(text=LAYER_TEXT, scope=scope, wanted="nothing like it at all") is None
