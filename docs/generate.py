#!/usr/bin/env python3
"""Writes the reference pages that are made from code; ``--check`` only says which of them are out of date.

A new page is a function that returns its text and an entry in ``PAGES``.
"""

import argparse
import difflib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment() -> str:
    from sglang.srt.lk import config

    groups: dict[str, list[str]] = {}
    for name, row in config.VARIABLES.items():
        default = row.kind.show(config.FIELDS[name].default) or "none"
        status = _status(row)
        groups.setdefault(row.group, []).append(_row(f"`{name}`", row.kind.label, default, row.about, row.since, status))
    parts = [ENVIRONMENT]
    heading = _row("variable", "type", "default", "meaning", "since", "status") + "\n|" + " --- |" * 6
    for group, rows in groups.items():
        parts.append("\n".join([f"## {group}\n", heading, *rows]))
    build = [
        _row(f"`{name}`", kind, default, about, "0.5.23.1", "works")
        for name, (kind, default, about) in config.BUILD.items()
    ]
    parts.append("\n".join(["## Build\n\nRead while the wheel is built; no effect when serving.\n", heading, *build]))
    retired = [_row(f"`{name}`", why) for name, why in config.RETIRED.items()]
    parts.append("\n".join(["## Retired\n\nAccepted with one warning, without effect.\n", "| variable | why |\n| --- | --- |", *retired]))
    renamed = [_row(f"`{old}`", f"`{new}`") for old, new in config.RENAMED.items()]
    parts.append("\n".join([LEGACY, "| legacy name | read as |\n| --- | --- |", _row("`LVLLM_*`", "`LK_*`"), *renamed]))
    return "\n\n".join(parts) + "\n"


ENVIRONMENT = """\
<!-- made by docs/generate.py from python/sglang/srt/lk/config.py -->
# Environment variables

With `LK_MOE_HYBRID_ENABLED` unset or `0` you run stock SGLang: no other variable below has any effect. With `1`, the
environment is checked before anything else starts. Every problem is listed in one message and the exit status is 2; a name
that starts with `LK_` and is not on this page is a problem too. Values are stripped, and an empty value is an unset one.

The status says what this build does with a variable:

* **works**
* **refused until built**: a value that turns the feature on stops the start; one that means "off" passes.
* **no effect until built**: tunes a feature that this build does not have. Accepted; one line says so if it is not the default.
* **alias**: values of another engine that stand for the default, said once."""

LEGACY = """\
## Legacy names

Renamed at the start, with one line. If both names are set, the `LK_*` name wins.
"""


def _status(row) -> str:
    from sglang.srt.lk import config

    if row.feature in config.NOT_BUILT:
        return "refused until built" if row.asks else "no effect until built"
    if row.alias:
        return "alias: " + ", ".join(f"`{row.kind.show(value)}`" for value in row.alias)
    return "works"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAGES = {"docs/reference/environment.md": environment}


def _out_of_date(check: bool) -> Iterator[str]:
    for name, make in PAGES.items():
        file, text = ROOT / name, make()
        old = file.read_text() if file.exists() else ""
        if text != old and check:
            yield "".join(difflib.unified_diff(old.splitlines(True), text.splitlines(True), name, "made from code"))
        elif text != old:
            file.write_text(text)


def _light_package() -> None:
    """``sglang`` over the source tree alone: its ``__init__`` loads torch, which no page needs."""
    for name in ("sglang", "sglang.srt"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / "python" / Path(*name.split(".")))]
        sys.modules[name] = package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 with a diff if a page is out of date")
    arguments = parser.parse_args()
    _light_package()
    diffs = list(_out_of_date(arguments.check))
    if diffs:
        sys.stderr.write("".join(diffs) + "out of date: run docs/generate.py\n")
    return 1 if diffs else 0


if __name__ == "__main__":
    sys.exit(main())
