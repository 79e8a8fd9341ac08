"""Commands on pages and in scripts: they parse, their programs are known, and every flag exists where it is used.

Variables (``LK_*``) are checked by ``test/lk/test_config.py``. A program that a page newly uses is a word in ``FOREIGN``,
a flag of such a program an entry in ``FOREIGN_FLAGS``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT, SCRIPTS, Block, blocks, commands, flags

FOREIGN = set("apt-get break cd cmake curl echo grep jq kill mkdir pip python python3 rm sed sleep tee wait".split())
FOREIGN_FLAGS = {
    "cmake": {"--build", "--parallel"},
    "docker": {"--cap-add"},
    "pip": {"--no-build-isolation", "--no-deps", "--no-index", "--find-links", "--progress-bar"},
}
SHELL_WORDS = {"until", "do", "done", "while", "if", "then", "fi", "for", "(", ")", "{", "}"}
BLOCKS = [block for page in PAGES for block in blocks(page, "bash", "console")]


def calls(block: Block) -> list[list[str]]:
    """The simple commands of a block, each as words without its variable settings and redirections."""
    out: list[list[str]] = []
    for line in commands(block):
        tokens = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        tokens.whitespace_split = True
        words: list[str] = []
        for token in [*tokens, ";"]:
            if re.fullmatch(r"[();|&]+", token):
                out, words = out + [words], []
            elif token not in SHELL_WORDS:
                words.append(token)
    calls = (strip(words) for words in out)
    return [words for words in calls if words]


def strip(words: list[str]) -> list[str]:
    """Without redirections, ``sudo`` and settings like ``LK_THREADS=8`` in front."""
    words = [word for i, word in enumerate(words) if not re.fullmatch(r"[<>&]+", word) and not re.fullmatch(r"[<>]+", words[i - 1] if i else "")]
    while words and (words[0] == "sudo" or re.match(r"\w+=", words[0])):
        words = words[1:]
    return words


def program(words: list[str]) -> str:
    return Path(words[0]).name if words[0].startswith((".venv/", "../.venv/")) else words[0]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=lambda block: block.name)
def test_a_block_is_shell(block):
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_program_is_ours_or_a_known_one(block):
    for words in calls(block):
        name = program(words)
        ours = name in ("sglang", "sglang-lk", "lk_selfcheck", "build/selfcheck/lk_selfcheck") or (name.startswith(("./", "launch/", "docs/", ".ci/")) and (ROOT / name).is_file())
        assert ours or name in FOREIGN, words


def test_every_sglang_lk_command_on_a_page_is_accepted():
    from sglang.srt.lk import cli

    found = [words for block in BLOCKS for words in calls(block) if program(words) == "sglang-lk" and "--help" not in words]
    assert len(found) > 10
    refused = []
    for words in found:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                cli.parser().parse_args(words[1:])
            except SystemExit:
                refused.append((words, said.getvalue()))
    assert refused == []


def test_every_overlay_command_on_a_page_exists():
    found = [words for block in BLOCKS for words in calls(block) if words[1:3] == ["-m", "overlay"]]
    known = re.findall(r"^(\w+) ", (ROOT / "python/overlay/commands.py").read_text().split('"""')[1], re.MULTILINE)
    assert found
    assert [words for words in found if words[3] not in known] == []


@cache
def upstream_flags() -> set[str]:
    """What ``sglang serve`` knows: the fields of ``ServerArgs``, and the options written out beside them."""
    places = [Path(place) / "srt" for place in find_spec("sglang").submodule_search_locations]
    srt = next(place for place in places if (place / "server_args.py").is_file())
    files = [srt / "server_args.py", *srt.glob("arg_groups/**/*.py")]
    known: set[str] = set()
    for file in files:
        text = file.read_text()
        known |= flags(text)
        fields = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AnnAssign))
        known |= {f"--{node.target.id.replace('_', '-')}" for node in fields if isinstance(node.target, ast.Name)}
    return known


@cache
def our_flags() -> set[str]:
    """Options of our programs: every option string in the modules that parse a command line."""
    sources = [ROOT / "docs/generate.py", *ROOT.glob("python/**/*.py"), *ROOT.glob("launch/*.py"), *ROOT.glob("test/serving/*.py"), *ROOT.glob("test/bench/**/*.py")]
    texts = [text for source in sources if "add_argument" in (text := source.read_text())]
    checks = re.findall(r"word == \"(--[a-z-]+)\"", (ROOT / "sgl-kernel-ext/check/main.cpp").read_text())
    return {flag for text in texts for flag in re.findall(r"\(\s*\"(--[a-z-]+)\"", text)}.union(checks)


@pytest.mark.upstream
@pytest.mark.parametrize("file", [*PAGES, *SCRIPTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_every_flag_exists(file):
    assert {"--model-path", "--device", "--dtype"} <= upstream_flags()
    known = upstream_flags() | our_flags() | {"--help"}.union(*FOREIGN_FLAGS.values())
    assert flags(file.read_text()) - known == set()


@pytest.mark.upstream
def test_every_flag_of_a_server_on_a_page_is_upstreams():
    found = [words for block in BLOCKS for words in calls(block) if program(words) == "sglang"]
    assert found
    for words in found:
        assert words[1] == "serve", words
        assert flags(" ".join(words)) - upstream_flags() == set()
