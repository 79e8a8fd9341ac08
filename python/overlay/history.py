"""How the edits fare from release to release, had each upgrade been made in its time.

Each release is judged as if the one before it had been read and accepted, which is what ``sync`` would have
met then. Beside the outcome stands how much upstream changed in the same file, for comparison.
"""

import difflib
from dataclasses import replace

from overlay.edits import Edit
from overlay.outcome import CONFLICT, OK, Outcome, Upstream, try_all


def table(*, edits: list[Edit], releases: list[Upstream]) -> str:
    """A Markdown table: one row per release, one column per edit, then the lines changed per edited file."""
    files = sorted({edit.file for edit in edits})
    heads = ["release", *[edit.id for edit in edits], *[f"`{file.rsplit('/', 1)[1]}` lines (changed)" for file in files]]
    rows = [heads, ["---"] * len(heads)]
    before: list[Outcome] = []
    earlier: Upstream | None = None
    for upstream in releases:
        read = [replace(edit, seen=_seen(edit=edit, before=before)) for edit in edits]
        outcomes, _ = try_all(edits=read, upstream=upstream)
        rows.append(
            [upstream.version, *[_cell(o, first=earlier is None) for o in outcomes]]
            + [_sizes(file=file, upstream=upstream, earlier=earlier) for file in files]
        )
        before, earlier = outcomes, upstream
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _seen(*, edit: Edit, before: list[Outcome]) -> dict[str, str]:
    return {o.version: o.hash for o in before if o.edit.id == edit.id and o.scope is not None}


def _cell(outcome: Outcome, *, first: bool) -> str:
    if outcome.kind == CONFLICT:
        return f"conflict: {outcome.code}"
    if outcome.kind == OK or first:
        return f"{'first' if first else 'ok'} (line {outcome.line})"
    return f"moved (line {outcome.line})"


def _sizes(*, file: str, upstream: Upstream, earlier: Upstream | None) -> str:
    if upstream.read(file) is None:
        return "absent"
    if earlier is None or earlier.read(file) is None:
        return str(upstream.size(file))
    lines = difflib.unified_diff(earlier.read(file).split("\n"), upstream.read(file).split("\n"), n=0, lineterm="")
    changed = sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in lines)
    return f"{upstream.size(file)} ({changed})"
