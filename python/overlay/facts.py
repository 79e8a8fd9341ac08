"""What is generated beside the pins and compared by ``check``: requirements, upstream's licence, the list of edits.

``upstream-requires-VERSION.txt`` holds upstream's ``Requires-Dist`` and ``Provides-Extra`` lines as they
stand, so that metadata needs no download; the licence travels in our wheel. ``docs/reference/edits.md`` is the edits for a reader.
"""

import zipfile
from pathlib import Path

from overlay import PYTHON, ROOT
from overlay.edits import Edit
from overlay.pins import Pins

LICENCE = PYTHON / "upstream-LICENSE"
EDITS_PAGE = ROOT / "docs" / "reference" / "edits.md"


def requires_path(version: str) -> Path:
    """Where the requirements of one release are kept."""
    return PYTHON / f"upstream-requires-{version}.txt"


def requires(wheel: Path) -> str:
    """The requirement lines of one wheel, in upstream's order."""
    lines = _read(wheel=wheel, ending=".dist-info/METADATA").split("\n\n", 1)[0].split("\n")
    return "".join(f"{line}\n" for line in lines if line.startswith(("Requires-Dist: ", "Provides-Extra: ")))


def licence(wheel: Path) -> str:
    """Upstream's licence file."""
    return _read(wheel=wheel, ending=".dist-info/licenses/LICENSE")


def _read(*, wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(ending))).decode()


def edits_page(*, edits: list[Edit], pins: Pins) -> str:
    """The text of ``docs/reference/edits.md``."""
    files = sorted({edit.file for edit in edits})
    total = sum(edit.line_count for edit in edits)
    out = [
        "# Edits to upstream",
        "",
        "<!-- Generated from python/edits by `python -m overlay check --write`. -->",
        "",
        f"{len(edits)} edits in {len(files)} upstream files, {total} lines in all, the same for"
        f" {', '.join(pins.tags)}. In an installed file each stands between `# lk: ID` and `# lk: end`;"
        " without these blocks the file is upstream's, byte for byte.",
    ]
    for edit in edits:
        place = " › ".join(f"`{line}`" for line in edit.within) or "the whole file"
        out += [
            "",
            f"## {edit.id}",
            "",
            edit.why,
            "",
            f"* File: `{edit.file}`, in {place}",
            f"* Place: {edit.op} `{edit.anchor}`",
            f"* May go {edit.retire}",
            "",
            "```python",
            edit.text.strip("\n"),
            "```",
        ]
    return "\n".join(out) + "\n"
