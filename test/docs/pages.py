"""What the project's pages contain: fenced blocks, links, anchors, flags. Reading only; the tests judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "launch/README.md"])
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.py"), ROOT / "test/run.sh", ROOT / ".ci/run"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w/-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


class Block(NamedTuple):
    page: Path
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0][:60]}"


def blocks(page: Path, *languages: str) -> list[Block]:
    found = [Block(page, *match.groups()) for match in FENCE.finditer(page.read_text())]
    return [block for block in found if not languages or block.language in languages]


def commands(block: Block) -> list[str]:
    """The command lines of a ``bash`` block, or those after ``$`` of a ``console`` block; continued lines joined."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        return [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets inside the project, as written."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def flags(text: str) -> set[str]:
    return set(FLAG.findall(text))
