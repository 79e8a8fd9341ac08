"""The commands of ``python -m overlay``, run in ``python/``. Each returns an exit status: 0 done, 1 problems.

check [VERSION …]   every pinned release (or those named): edits, budgets, checksums and generated files
sync VERSION        take up a new release: fetch, check, and only if all is well rewrite pins and facts
accept ID [VERSION] say that the edit was read against that release's scope (default: the default pin)
diff [VERSION]      the edits as ordinary patches, in build/
tree DIR [VERSION]  an edited copy of upstream's package in DIR (also what the build calls)
history VERSION …   how the edits fare from release to release, as a table
"""

import argparse
import difflib
import sys
from dataclasses import replace
from pathlib import Path

from overlay import ROOT, OverlayError, edits, facts, history, pins, report, tree, wheels
from overlay.outcome import CONFLICT, MOVED, OK, Outcome, Upstream, try_all

MOST_FILES, MOST_INSERTED = 4, 30


def say(text: str = "") -> None:
    """One line (or block) for the person at the terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Parse and run one command; an ``OverlayError`` becomes its message and exit status 1."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except OverlayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check_parser = commands.add_parser("check", help="check every pinned release")
    check_parser.add_argument("versions", nargs="*", metavar="VERSION")
    check_parser.add_argument("--write", action="store_true", help="rewrite generated files and canonical form")
    check_parser.set_defaults(run=check)
    for name, run, help in (
        ("sync", sync, "take up a new release"),
        ("diff", diff, "write patches to build/"),
    ):
        sub = commands.add_parser(name, help=help)
        sub.add_argument("version", nargs="?" if name == "diff" else None, metavar="VERSION")
        sub.set_defaults(run=run)
    accept_parser = commands.add_parser("accept", help="say that an edit was read against a release")
    accept_parser.add_argument("id", metavar="ID")
    accept_parser.add_argument("version", nargs="?", metavar="VERSION")
    accept_parser.set_defaults(run=accept)
    tree_parser = commands.add_parser("tree", help="an edited copy of upstream in a folder")
    tree_parser.add_argument("folder", type=Path, metavar="DIR")
    tree_parser.add_argument("version", nargs="?", metavar="VERSION")
    tree_parser.set_defaults(run=make_tree)
    history_parser = commands.add_parser("history", help="how the edits fare over past releases")
    history_parser.add_argument("versions", nargs="+", metavar="VERSION")
    history_parser.set_defaults(run=show_history)
    return parser


def check(options: argparse.Namespace) -> int:
    """Everything that can be wrong, in one run."""
    pinned, all_edits = pins.load(), edits.load()
    if options.write:
        edits.write(all_edits)
        facts.EDITS_PAGE.parent.mkdir(parents=True, exist_ok=True)
        facts.EDITS_PAGE.write_text(facts.edits_page(edits=all_edits, pins=pinned), encoding="utf-8")
    problems = _own_problems(pinned=pinned, all_edits=all_edits)
    for version in options.versions or pinned.tags:
        wheel = wheels.get(pins=pinned, version=version)
        outcomes, _ = try_all(edits=all_edits, upstream=Upstream(wheel=wheel, version=version))
        problems += _reports(outcomes=outcomes, pinned=pinned, all_edits=all_edits)
        if version in pinned.tags:
            problems += _pin_problems(tag=pinned.tags[version], wheel=wheel, all_edits=all_edits)
        say(f"sglang {version}: {report.summary(outcomes=outcomes, ending=_compiles(outcomes))}")
    for problem in problems:
        say("\n" + problem)
    if problems:
        say(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}")
    return 1 if problems else 0


def _compiles(outcomes: list[Outcome]) -> str:
    return "not applicable" if any(o.kind == CONFLICT for o in outcomes) else "the result compiles"


def _own_problems(*, pinned: pins.Pins, all_edits: list[edits.Edit]) -> list[str]:
    """What can be said without a wheel: budgets, canonical form, generated pages."""
    problems = []
    files = {edit.file for edit in all_edits}
    # Two tag lines stand around each edit; they are inserted as well.
    inserted = sum(edit.line_count + 2 for edit in all_edits)
    if len(files) > MOST_FILES:
        problems.append(f"error[budget]: {len(files)} upstream files are edited; at most {MOST_FILES}")
    if inserted > MOST_INSERTED:
        problems.append(f"error[budget]: {inserted} lines are inserted, tags counted; at most {MOST_INSERTED}")
    rewrite = "(rewrite it with: python -m overlay check --write)"
    problems += [f"error[form]: {path} is not in canonical form {rewrite}" for path in edits.uncanonical(all_edits)]
    if pins.PATH.read_text(encoding="utf-8") != pins.format(pinned):
        problems.append("error[form]: python/upstream.toml is not in canonical form (only `sync` writes it)")
    page = facts.EDITS_PAGE
    if not page.is_file() or page.read_text(encoding="utf-8") != facts.edits_page(edits=all_edits, pins=pinned):
        problems.append(f"error[generated]: {page.relative_to(ROOT)} is out of date {rewrite}")
    return problems


def _pin_problems(*, tag: pins.Tag, wheel: Path, all_edits: list[edits.Edit]) -> list[str]:
    """Checksums of the edited files, and what was generated from the wheel."""
    problems = []
    found = _checksums(upstream=Upstream(wheel=wheel, version=tag.version), all_edits=all_edits)
    if found != tag.files:
        problems.append(
            f"error[checksum]: the edited files of {tag.version} differ from `files` in python/upstream.toml"
            f" (take them up with: python -m overlay sync {tag.version})"
        )
    for path, wanted in ((facts.requires_path(tag.version), facts.requires(wheel)), (facts.LICENCE, facts.licence(wheel))):
        if not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            problems.append(
                f"error[generated]: {path.relative_to(ROOT)} is not what the wheel says"
                f" (rewrite it with: python -m overlay sync {tag.version})"
            )
    return problems


def _checksums(*, upstream: Upstream, all_edits: list[edits.Edit]) -> dict[str, str]:
    files = sorted({edit.file for edit in all_edits})
    return {file: wheels.sha256(upstream.read(file).encode()) for file in files if upstream.read(file) is not None}


def _reports(*, outcomes: list[Outcome], pinned: pins.Pins, all_edits: list[edits.Edit]) -> list[str]:
    """The reports of all outcomes that are not ok; moved ones with the diff from the last release read."""
    problems = []
    for found in outcomes:
        if found.kind == OK:
            continue
        base = _base(edit=found.edit, version=found.version)
        before = None
        if found.kind == MOVED and base:
            wheel = wheels.get(pins=pinned, version=base)
            earlier, _ = try_all(edits=all_edits, upstream=Upstream(wheel=wheel, version=base))
            before = next(o for o in earlier if o.edit.id == found.edit.id)
        problems.append(report.outcome(found=found, base=base, before=before))
    return problems


def _base(*, edit: edits.Edit, version: str) -> str:
    """The newest release that was read and is not newer than ``version``; else the oldest that was read."""
    read = sorted(edit.seen, key=pins.split)
    older = [tag for tag in read if pins.split(tag) <= pins.split(version)]
    return older[-1] if older else (read[0] if read else "")


def sync(options: argparse.Namespace) -> int:
    """Take up one release, whole or not at all."""
    version, pinned, all_edits = options.version, pins.load(), edits.load()
    pins.split(version)
    found = {}
    for python in wheels.PYTHONS:
        for machine in wheels.MACHINES:
            say(f"wheel  sglang {version}  {python}  {machine}")
            wheel = wheels.get(pins=pinned, version=version, python=python, machine=machine)
            found[wheel] = Upstream(wheel=wheel, version=version)
    sums = [_checksums(upstream=upstream, all_edits=all_edits) for upstream in found.values()]
    if any(other != sums[0] for other in sums):
        raise OverlayError(f"the wheels of {version} differ in the files we edit: they cannot share one set of edits")
    mine = wheels.get(pins=pinned, version=version)
    outcomes, _ = try_all(edits=all_edits, upstream=found[mine])
    problems = _reports(outcomes=outcomes, pinned=pinned, all_edits=all_edits)
    if problems:
        say("\n" + "\n\n".join(problems) + "\n")
        say(report.summary(outcomes=outcomes, ending="nothing written"))
        return 1
    revision = pinned.tags[version].revision if version in pinned.tags else 1
    tag = pins.Tag(
        version=version,
        revision=revision,
        wheels={wheel.name: wheels.sha256(wheel.read_bytes()) for wheel in found},
        files=sums[0],
    )
    _write_all(pinned=pinned.with_tag(tag), outcomes=outcomes, wheel=mine, version=version)
    say(report.summary(outcomes=outcomes, ending=f"{version} is pinned as {tag.own_version}"))
    return 0


def _write_all(*, pinned: pins.Pins, outcomes: list[Outcome], wheel: Path, version: str) -> None:
    read = [replace(o.edit, seen={**o.edit.seen, version: o.hash}) for o in outcomes]
    edits.write(read)
    pins.PATH.write_text(pins.format(pinned), encoding="utf-8")
    facts.requires_path(version).write_text(facts.requires(wheel), encoding="utf-8")
    facts.LICENCE.write_text(facts.licence(wheel), encoding="utf-8")
    facts.EDITS_PAGE.parent.mkdir(parents=True, exist_ok=True)
    facts.EDITS_PAGE.write_text(facts.edits_page(edits=edits.load(), pins=pinned), encoding="utf-8")


def accept(options: argparse.Namespace) -> int:
    """Record that one edit was read against the scope as one release has it."""
    pinned, all_edits = pins.load(), edits.load()
    version = options.version or pinned.default
    if options.id not in [edit.id for edit in all_edits]:
        raise OverlayError(f"no edit {options.id}; there are {', '.join(edit.id for edit in all_edits)}")
    wheel = wheels.get(pins=pinned, version=version)
    outcomes, _ = try_all(edits=all_edits, upstream=Upstream(wheel=wheel, version=version))
    mine = next(o for o in outcomes if o.edit.id == options.id)
    if mine.kind == CONFLICT:
        base = _base(edit=mine.edit, version=version)
        raise OverlayError(f"a conflict cannot be accepted\n\n{report.outcome(found=mine, base=base)}")
    read = replace(mine.edit, seen={**mine.edit.seen, version: mine.hash})
    edits.write([read if edit.id == read.id else edit for edit in all_edits])
    say(f"{read.id}: read against sglang {version}, {mine.scope.name}, line {mine.line}")
    return 0


def diff(options: argparse.Namespace) -> int:
    """Write one patch per edited file, for reviewers and ordinary tools."""
    pinned, all_edits = pins.load(), edits.load()
    version = options.version or pinned.default
    upstream = Upstream(wheel=wheels.get(pins=pinned, version=version), version=version)
    outcomes, texts = try_all(edits=all_edits, upstream=upstream)
    for file, text in texts.items():
        old, new = upstream.read(file).splitlines(keepends=True), text.splitlines(keepends=True)
        path = ROOT / "build" / "patches" / version / f"{file}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(difflib.unified_diff(old, new, f"a/{file}", f"b/{file}")), encoding="utf-8")
        say(str(path.relative_to(ROOT)))
    problems = _reports(outcomes=outcomes, pinned=pinned, all_edits=all_edits)
    for problem in problems:
        say("\n" + problem)
    return 1 if problems else 0


def make_tree(options: argparse.Namespace) -> int:
    """An edited copy of upstream's package in a folder."""
    pinned = pins.load()
    tag = pinned.tag(options.version) if options.version else pinned.chosen()
    made = tree.build(pins=pinned, tag=tag, edits=edits.load(), folder=options.folder)
    say(f"sglang {tag.version} with our edits is in {made}")
    return 0


def show_history(options: argparse.Namespace) -> int:
    """The table of ``docs/explanation/tracking-upstream.md``."""
    pinned = pins.load()
    found = [
        Upstream(wheel=wheels.get(pins=pinned, version=version), version=version)
        for version in sorted(options.versions, key=pins.split)
    ]
    say(history.table(edits=edits.load(), releases=found))
    return 0
