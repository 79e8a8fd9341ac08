"""An edited copy of one upstream wheel on disk: what the build installs, and what a checkout can try.

``python -m overlay tree DIR`` makes it; ``PYTHONPATH=DIR`` then shows it in place of an installed one.
Made again only where something changed: files keep their time stamps, so builds stay incremental. The stamp says which files
are edited; one that is no longer is upstream's again.
Our own package is not in it (the wheel takes that from ``python/sglang/srt/lk``).
"""

import json
import shutil
import zipfile
from pathlib import Path

from overlay import OverlayError, report, wheels
from overlay.edits import Edit
from overlay.outcome import OK, Upstream, try_all
from overlay.pins import Pins, Tag

STAMP = "sglang/lk-build.json"


def build(*, pins: Pins, tag: Tag, edits: list[Edit], folder: Path) -> Path:
    """Make the tree of one pinned release in ``folder`` and return its ``sglang`` directory."""
    wheel = wheels.get(pins=pins, version=tag.version)
    outcomes, texts = try_all(edits=edits, upstream=Upstream(wheel=wheel, version=tag.version))
    problems = [report.outcome(found=o, base="") for o in outcomes if o.kind != OK]
    if problems:
        ending = report.summary(outcomes=outcomes, ending="nothing built")
        raise OverlayError("\n\n".join([*problems, ending]))
    _unpack(wheel=wheel, folder=folder)
    _restore((_edited(folder) or set()) - texts.keys(), wheel=wheel, folder=folder)
    stamp = {
        "distribution": "sglang-lk",
        "version": tag.own_version,
        "upstream": tag.version,
        "edited": {file: wheels.sha256(text.encode()) for file, text in sorted(texts.items())},
    }
    # Before the files: after an interrupted run the stamp names every file that may differ from upstream's.
    _write(path=folder / STAMP, text=json.dumps(stamp, indent=1) + "\n")
    for file, text in texts.items():
        _write(path=folder / file, text=text)
    return folder / "sglang"


def _unpack(*, wheel: Path, folder: Path) -> None:
    """Unpack once per wheel; the marker is written last, so an interrupted run starts over. So does one whose stamp is damaged."""
    marker = folder / ".unpacked"
    if marker.is_file() and marker.read_text(encoding="utf-8") == wheel.name and _edited(folder) is not None:
        return
    if folder.exists() and any(folder.iterdir()) and not marker.is_file() and not (folder / ".unpacking").is_file():
        raise OverlayError(f"{folder} is not empty and was not made by this tool: name another folder")
    shutil.rmtree(folder / "sglang", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    (folder / ".unpacking").touch()
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            target = folder / info.filename
            if info.is_dir() or not info.filename.startswith("sglang/"):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(info))
            target.chmod(0o755 if info.external_attr >> 16 & 0o100 else 0o644)
    marker.write_text(wheel.name, encoding="utf-8")
    (folder / ".unpacking").unlink()


def _edited(folder: Path) -> set[str] | None:
    """The files that the stamp names, none before there is a stamp; None if it cannot be read."""
    stamp = folder / STAMP
    try:
        return set(json.loads(stamp.read_text(encoding="utf-8"))["edited"]) if stamp.is_file() else set()
    except (ValueError, KeyError, TypeError):
        return None


def _restore(files: set[str], *, wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for file in files:
            (folder / file).write_bytes(archive.read(file))


def _write(*, path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
