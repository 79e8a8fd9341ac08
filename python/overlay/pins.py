"""Which upstream releases are built, with the checksum of every wheel and of every edited file.

The file is ``python/upstream.toml``. Only ``sync`` writes it; the build reads it and trusts nothing else.
A new release means ``python -m overlay sync VERSION``.
"""

import os
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from overlay import PYTHON, OverlayError

PATH = PYTHON / "upstream.toml"
HEAD = """\
# The upstream releases this repository builds. Written by `python -m overlay sync VERSION`.
# `revision` counts our releases on top of one of upstream's: raise it by hand, one by one.
"""


@dataclass(frozen=True)
class Tag:
    """One upstream release: ``wheels`` and ``files`` map names to ``sha256:…``."""

    version: str
    revision: int
    wheels: dict[str, str]
    files: dict[str, str]

    @property
    def own_version(self) -> str:
        """``0.5.23`` → ``0.5.23.1``; ``0.5.15.post1`` → ``0.5.15.101``, as PEP 440 has no ``post1.1``."""
        release, post = split(self.version)
        return f"{'.'.join(map(str, release))}.{100 * post + self.revision}"


@dataclass(frozen=True)
class Pins:
    """All pinned releases, newest first."""

    default: str
    tags: dict[str, Tag]

    def tag(self, version: str) -> Tag:
        """The pinned release, or an error that lists those there are."""
        if version not in self.tags:
            raise OverlayError(
                f"LK_UPSTREAM={version}: no such pinned release; pinned are {', '.join(self.tags)}"
                f" (add one with: cd python && python -m overlay sync {version})"
            )
        return self.tags[version]

    def chosen(self) -> Tag:
        """The release to build: ``LK_UPSTREAM``, else the default."""
        return self.tag(os.environ.get("LK_UPSTREAM") or self.default)

    def with_tag(self, tag: Tag) -> "Pins":
        """These pins plus one more release; the newest becomes the default."""
        tags = {**self.tags, tag.version: tag}
        newest_first = sorted(tags, key=split, reverse=True)
        return replace(self, default=newest_first[0], tags={v: tags[v] for v in newest_first})


def split(version: str) -> tuple[tuple[int, ...], int]:
    """``0.5.15.post1`` → ``((0, 5, 15), 1)``: sorts as releases do."""
    match = re.fullmatch(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?", version)
    if match is None:
        raise OverlayError(f"{version!r} is not a release of upstream (expected e.g. 0.5.23 or 0.5.15.post1)")
    return tuple(int(part) for part in match[1].split(".")), int(match[2] or 0)


def load(path: Path = PATH) -> Pins:
    """Read the pins."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    tags = {
        version: Tag(version=version, revision=tag["revision"], wheels=tag["wheels"], files=tag["files"])
        for version, tag in data["tags"].items()
    }
    return Pins(default=data["default"], tags=tags)


def format(pins: Pins) -> str:
    """The text of ``upstream.toml``: one name per line, so that a sync is a readable diff."""
    out = [HEAD, f'default = "{pins.default}"\n']
    for version, tag in pins.tags.items():
        out.append(f'\n[tags."{version}"]\nrevision = {tag.revision}\n')
        for table, sums in (("wheels", tag.wheels), ("files", tag.files)):
            out.append(f'\n[tags."{version}".{table}]\n')
            out += [f'"{name}" = "{sums[name]}"\n' for name in sorted(sums)]
    return "".join(out)
