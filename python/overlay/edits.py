"""The edits, one TOML per upstream file at the mirrored path, read and written in one canonical form.

Nothing here looks at upstream. ``accept`` and ``sync`` rewrite only ``seen``; everything else is written
by a person, in the order and shape that ``format`` gives (``check`` says so when a file differs).
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from overlay import PYTHON, OverlayError
from overlay.pins import split

FOLDER = PYTHON / "edits"
FIELDS = ("id", "why", "retire", "within", "anchor", "op", "text", "seen")
OPS = ("before", "after", "replace")
MOST_LINES = 8


@dataclass(frozen=True)
class Edit:
    """One insertion into ``file``; ``seen`` maps a release to the hash of the scope somebody read."""

    file: str
    id: str
    why: str
    retire: str
    within: tuple[str, ...]
    anchor: str
    op: str
    text: str
    seen: dict[str, str]

    @property
    def source(self) -> str:
        """The TOML that says so, as a path in the repository."""
        return f"python/edits/{self.file}.toml"

    @property
    def line_count(self) -> int:
        """Lines of text, tags not counted."""
        return len(self.text.strip("\n").split("\n"))


def load(folder: Path = FOLDER) -> list[Edit]:
    """All edits, file by file in the order they are made. Raises with every malformed one."""
    problems: list[str] = []
    edits: list[Edit] = []
    for path in sorted(folder.rglob("*.toml")):
        file = path.relative_to(folder).as_posix().removesuffix(".toml")
        for table in tomllib.loads(path.read_text(encoding="utf-8")).get("edit", []):
            problem = _problem(table)
            if problem:
                problems.append(f"python/edits/{file}.toml: {table.get('id', 'an edit without id')}: {problem}")
            else:
                edits.append(Edit(file=file, **{**table, "within": tuple(table["within"])}))
    ids = [edit.id for edit in edits]
    problems += [f"python/edits: id {id} is used {ids.count(id)} times" for id in sorted(set(ids)) if ids.count(id) > 1]
    if problems:
        raise OverlayError("\n".join(problems))
    return edits


def _problem(table: dict) -> str:
    missing = [field for field in FIELDS if field not in table and field != "seen"]
    unknown = [field for field in table if field not in FIELDS]
    if missing or unknown:
        return "; ".join([f"`{f}` is missing" for f in missing] + [f"`{f}` is not a field" for f in unknown])
    table.setdefault("seen", {})
    if table["op"] not in OPS:
        return f"op = {table['op']!r} must be one of {', '.join(OPS)}"
    count = len(table["text"].strip("\n").split("\n"))
    if count > MOST_LINES:
        return f"{count} lines of text; at most {MOST_LINES} (move the logic into sglang.srt.lk and call it)"
    return ""


def format(edits: list[Edit]) -> str:
    """The canonical text of one TOML file."""
    return "\n".join(_format_one(edit) for edit in edits)


def _format_one(edit: Edit) -> str:
    lines = ["[[edit]]"]
    for field in ("id", "why", "retire"):
        lines.append(f"{field:<6} = {_string(getattr(edit, field))}")
    lines.append(f"within = [{', '.join(_string(line) for line in edit.within)}]")
    lines.append(f"anchor = {_string(edit.anchor)}")
    lines.append(f"op     = {_string(edit.op)}")
    lines.append("text   = '''\n" + edit.text.strip("\n") + "\n'''")
    if edit.seen:
        lines += ["", "[edit.seen]"]
        lines += [f'"{tag}" = "{edit.seen[tag]}"' for tag in sorted(edit.seen, key=split, reverse=True)]
    return "\n".join(lines) + "\n"


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def write(edits: list[Edit], folder: Path = FOLDER) -> None:
    """Write every edit back to the file it came from."""
    for file in {edit.file for edit in edits}:
        path = folder / f"{file}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(format([edit for edit in edits if edit.file == file]), encoding="utf-8")


def uncanonical(edits: list[Edit], folder: Path = FOLDER) -> list[str]:
    """Files that do not read as ``format`` would write them."""
    files = sorted({edit.file for edit in edits})
    return [
        f"python/edits/{file}.toml"
        for file in files
        if (folder / f"{file}.toml").read_text(encoding="utf-8") != format([e for e in edits if e.file == file])
    ]
