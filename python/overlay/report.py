"""The words a person reads about outcomes. Everything needed to act is in the message: file, line, reason, hint.

Mock-ups of every message are the golden files of ``test/overlay``; change the words there first.
"""

import difflib

from overlay import source
from overlay.outcome import CONFLICT, MOVED, OK, Outcome

HINTS = {
    "file-gone": "moved upstream? rename the TOML to the new path, then: {accept}",
    "scope-gone": "renamed upstream? set `within` to the nearest line, then: {accept}",
    "scope-twice": "name an outer scope in `within`, so that only one is left, then: {accept}",
    "anchor-gone": "renamed upstream? set `anchor` to the nearest line, then: {accept}",
    "anchor-twice": "choose another line, or narrow `within`, then: {accept}",
    "does-not-parse": "upstream's file needs a newer Python: run this under the newest supported one",
    "does-not-compile": "the text does not fit its place: look at `op` and `anchor`, then: {accept}",
    "scope-moved": "read the diff; if the edit still does what `why` says: {accept}",
}


def outcome(*, found: Outcome, base: str, before: Outcome | None = None) -> str:
    """One problem in full. ``base`` is the release last accepted, ``before`` the outcome there."""
    edit = found.edit
    word = "question" if found.kind == MOVED else "error"
    versions = found.version if base in ("", found.version) else f"{base} → {found.version}"
    rows = [("edit", edit.source)]
    if found.kind == MOVED:
        rows.append(("scope", f"{found.scope.name} (lines {found.scope.first + 1}–{found.scope.last})"))
        rows.append(("anchor", f"line {found.line}   {edit.anchor}"))
    elif found.code in ("scope-gone", "scope-twice"):
        rows.append(("within", found.detail))
    elif found.code in ("anchor-gone", "anchor-twice"):
        rows.append(("anchor", found.detail))
    elif found.code == "file-gone":
        rows.append(("file", f"{edit.file}   (not in this release)"))
    else:
        rows.append(("result", found.detail))
    if found.near:
        rows.append(("nearest", "line {}   {}   (in {})".format(*found.near)))
    rows.append(("why", edit.why))
    accept = f"python -m overlay accept {edit.id} {found.version}"
    rows.append(("hint", HINTS[found.code].format(accept=accept)))
    lines = [f"{word}[{found.code}]: {edit.id}  sglang {versions}"]
    lines += [f"  {name:<9} {value}" for name, value in rows]
    if found.kind == MOVED:
        lines += _diff(found=found, before=before)
    return "\n".join(lines)


def _diff(*, found: Outcome, before: Outcome | None) -> list[str]:
    if before is None or before.scope is None:
        return ["  diff      no accepted release has this scope to compare with"]
    old, new = (source.scope_text(text=o.text, scope=o.scope).split("\n") for o in (before, found))
    names = (f"{o.scope.name}  sglang {o.version}" for o in (before, found))
    return ["    " + line for line in difflib.unified_diff(old, new, *names, lineterm="")]


def summary(*, outcomes: list[Outcome], ending: str) -> str:
    """``1 conflict, 1 moved, 9 ok of 11 edits — nothing written``."""
    counts = {kind: sum(o.kind == kind for o in outcomes) for kind in (CONFLICT, MOVED, OK)}
    parts = [f"{n} {kind}{'s' if kind == CONFLICT and n > 1 else ''}" for kind, n in counts.items() if n]
    return f"{', '.join(parts)} of {len(outcomes)} edit{'s' if len(outcomes) != 1 else ''} — {ending}"
