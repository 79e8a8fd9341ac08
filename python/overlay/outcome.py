"""What became of one edit in one release: ok, moved or conflict.

``ok``: the anchor is there once and the scope reads as somebody read it before. ``moved``: the anchor is
there, the scope's text is new, and a person has to look (``accept``). ``conflict``: the edit cannot be made,
or the result does not compile. All edits of all files are tried; nothing stops at the first problem.
"""

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from overlay import source
from overlay.edits import Edit
from overlay.wheels import sha256

OK, MOVED, CONFLICT = "ok", "moved", "conflict"


@dataclass(frozen=True)
class Outcome:
    """One edit against one release. ``code`` names the problem; ``near`` is (line from 1, text, where)."""

    edit: Edit
    version: str
    kind: str
    code: str = ""
    detail: str = ""
    scope: source.Scope | None = None
    text: str = field(default="", repr=False)
    line: int = 0
    near: tuple[int, str, str] | None = None

    @property
    def hash(self) -> str:
        """The hash of the scope as this release has it."""
        return sha256(source.scope_text(text=self.text, scope=self.scope).encode())


class Upstream:
    """Files of one wheel, read on demand."""

    def __init__(self, *, wheel: Path, version: str):
        self.version, self.wheel = version, wheel
        self._zip = zipfile.ZipFile(wheel)
        self._names = set(self._zip.namelist())

    def read(self, file: str) -> str | None:
        """The text of one file, or None if the release does not have it."""
        return self._zip.read(file).decode() if file in self._names else None

    def size(self, file: str) -> int:
        """Lines of one file."""
        return (self.read(file) or "").count("\n")


def try_all(*, edits: list[Edit], upstream: Upstream) -> tuple[list[Outcome], dict[str, str]]:
    """Every outcome, and the edited text of each file whose edits could all be made."""
    outcomes: list[Outcome] = []
    texts: dict[str, str] = {}
    for file in sorted({edit.file for edit in edits}):
        done, text = _try_file(
            edits=[edit for edit in edits if edit.file == file], original=upstream.read(file), version=upstream.version
        )
        outcomes += done
        if text is not None:
            texts[file] = text
    return outcomes, texts


def _try_file(*, edits: list[Edit], original: str | None, version: str) -> tuple[list[Outcome], str | None]:
    if original is None:
        return [Outcome(edit=e, version=version, kind=CONFLICT, code="file-gone") for e in edits], None
    outcomes = [judge(edit=edit, text=original, version=version) for edit in edits]
    if any(outcome.kind == CONFLICT for outcome in outcomes):
        return outcomes, None
    text = original
    # From the last line up and, at one line, from its end: line numbers of the original stay true.
    rank = {"before": 0, "replace": 1, "after": 2}
    places = sorted(((o.line, rank[o.edit.op], n, o.edit) for n, o in enumerate(outcomes)), reverse=True)
    for line, _, _, edit in places:
        text = source.insert(text=text, at=line - 1, op=edit.op, id=edit.id, added=edit.text)
    try:
        compile(text, edits[0].file, "exec", dont_inherit=True)
    except SyntaxError as error:
        detail = f"line {error.lineno} of the result: {error.msg}"
        return [
            Outcome(edit=e, version=version, kind=CONFLICT, code="does-not-compile", detail=detail) for e in edits
        ], None
    return outcomes, text


def judge(*, edit: Edit, text: str, version: str) -> Outcome:
    """One edit against the text of its file."""
    try:
        scope = source.find_scope(text=text, within=edit.within)
        line = source.find_anchor(text=text, scope=scope, anchor=edit.anchor)
    except SyntaxError as error:
        detail = f"line {error.lineno} of upstream's file: {error.msg}"
        return Outcome(edit=edit, version=version, kind=CONFLICT, code="does-not-parse", detail=detail)
    except source.NotFound as error:
        return _not_found(edit=edit, text=text, version=version, error=error)
    found = Outcome(edit=edit, version=version, kind=OK, scope=scope, text=text, line=line + 1)
    if found.hash in edit.seen.values():
        return found
    return Outcome(
        edit=edit, version=version, kind=MOVED, code="scope-moved", scope=scope, text=text, line=line + 1
    )


def _not_found(*, edit: Edit, text: str, version: str, error: source.NotFound) -> Outcome:
    near = None
    lines = text.split("\n")
    if error.lines:
        detail = "found on lines " + ", ".join(str(n + 1) for n in error.lines)
    else:
        detail = f"not in {error.scope.name}"
        n = source.nearest(text=text, scope=error.scope, wanted=error.wanted)
        near = None if n is None else (n + 1, lines[n].strip(), source.enclosing(text=text, line=n))
    return Outcome(
        edit=edit, version=version, kind=CONFLICT, code=error.code, detail=f"{error.wanted}   ({detail})", near=near
    )
