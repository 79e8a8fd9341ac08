"""Scopes, anchors, insertion and its undoing: pure functions on the text of one Python file.

A scope is a class or function named by its first line, outermost first; an anchor is a whole line, told
apart from its indentation, that occurs exactly once inside the scope. There are no patterns and no
counts: a line that is not exactly there is a conflict for a person to read.
"""

import ast
import difflib
import textwrap
from dataclasses import dataclass

OPEN, WAS, CLOSE = "# lk: ", "# lk: was ", "# lk: end"


@dataclass(frozen=True)
class Scope:
    """Lines ``first`` to ``last`` (counted from 0, ``last`` excluded) under a readable name."""

    name: str
    first: int
    last: int


class NotFound(Exception):
    """A scope or anchor that is not there exactly once; ``code`` and ``line`` go into the report."""

    def __init__(self, *, code: str, wanted: str, scope: Scope, lines: list[int]):
        super().__init__(f"{code}: {wanted}")
        self.code, self.wanted, self.scope, self.lines = code, wanted, scope, lines


def find_scope(*, text: str, within: tuple[str, ...]) -> Scope:
    """The innermost scope; the whole file if ``within`` is empty. Raises ``NotFound`` or ``SyntaxError``."""
    lines = text.split("\n")
    scope = Scope(name="the file", first=0, last=len(lines))
    body: list[ast.AST] = [ast.parse(text)]
    for wanted in within:
        inside = [
            node
            for outer in body
            for node in ast.walk(outer)
            if node not in body and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        found = [node for node in inside if lines[node.lineno - 1].strip().startswith(wanted)]
        if len(found) != 1:
            code = "scope-twice" if found else "scope-gone"
            raise NotFound(code=code, wanted=wanted, scope=scope, lines=[node.lineno - 1 for node in found])
        name = found[0].name if scope.name == "the file" else f"{scope.name}.{found[0].name}"
        scope = Scope(name=name, first=found[0].lineno - 1, last=found[0].end_lineno)
        body = [found[0]]
    return scope


def find_anchor(*, text: str, scope: Scope, anchor: str) -> int:
    """The number of the anchor's line, counted from 0. Raises ``NotFound``."""
    lines = text.split("\n")
    found = [n for n in range(scope.first, scope.last) if lines[n].strip() == anchor]
    if len(found) != 1:
        code = "anchor-twice" if found else "anchor-gone"
        raise NotFound(code=code, wanted=anchor, scope=scope, lines=found)
    return found[0]


def nearest(*, text: str, scope: Scope, wanted: str) -> int | None:
    """The line that resembles ``wanted`` most: in the scope, else anywhere in the file."""
    lines = text.split("\n")
    for span in (range(scope.first, scope.last), range(len(lines))):
        candidates = {lines[n].strip(): n for n in span}
        best = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.6)
        if best:
            return candidates[best[0]]
    return None


def enclosing(*, text: str, line: int) -> str:
    """The innermost class or function that holds a line (counted from 0), as ``FusedMoE.__init__``."""
    names, body = [], ast.parse(text)
    while True:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        holds = (n for n in ast.walk(body) if n is not body and isinstance(n, kinds))
        body = next((n for n in holds if n.lineno - 1 <= line < n.end_lineno), None)
        if body is None:
            return ".".join(names) or "the file"
        names.append(body.name)


def scope_text(*, text: str, scope: Scope) -> str:
    """What ``seen`` hashes and what a moved scope is compared by."""
    return "\n".join(text.split("\n")[scope.first : scope.last])


def block(*, id: str, indent: str, text: str, was: str | None) -> list[str]:
    """The tagged lines of one edit; a replaced line stays in the block, so that nothing is lost."""
    body = textwrap.dedent(text).strip("\n").split("\n")
    kept = [] if was is None else [f"{indent}{WAS}{was}"]
    return [f"{indent}{OPEN}{id}", *kept, *[indent + line if line else "" for line in body], f"{indent}{CLOSE}"]


def insert(*, text: str, at: int, op: str, id: str, added: str) -> str:
    """The file with one edit made at the anchor on line ``at``."""
    lines = text.split("\n")
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    new = block(id=id, indent=indent, text=added, was=line.strip() if op == "replace" else None)
    first, last = {"before": (at, at), "after": (at + 1, at + 1), "replace": (at, at + 1)}[op]
    return "\n".join([*lines[:first], *new, *lines[last:]])


def strip(text: str) -> str:
    """The upstream file again: every tagged block removed, every replaced line put back."""
    out: list[str] = []
    inside = False
    for line in text.split("\n"):
        word = line.strip()
        if not inside and word.startswith(OPEN):
            inside = True
        elif inside and word == CLOSE:
            inside = False
        elif inside and word.startswith(WAS):
            out.append(line.replace(WAS, "", 1))
        elif not inside:
            out.append(line)
    return "\n".join(out)
