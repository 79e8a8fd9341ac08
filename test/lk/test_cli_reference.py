"""docs/reference/cli.md shows the help that the command really prints.

``python test/lk/test_cli_reference.py`` writes the help into the page.
"""

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/cli.md"
BLOCK = re.compile(r"```console\n\$ (sglang-lk [^\n]*--help)\n(.*?)```", re.DOTALL)
COLUMNS = "110"


def help_of(command, capsys, monkeypatch):
    from sglang.srt.lk import cli

    monkeypatch.setenv("COLUMNS", COLUMNS)
    with pytest.raises(SystemExit) as end:
        cli.main(command.split()[1:])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_page_shows_the_help_of_every_command(capsys, monkeypatch):
    blocks = BLOCK.findall(PAGE.read_text())
    commands = ("", " doctor", " bench", " bench kernels", " bench compare", " bench handover", " bench decode", " bench prefill")
    assert [command for command, _ in blocks] == [f"sglang-lk{name} --help" for name in commands]
    for command, shown in blocks:
        # Words only: Python versions break lines differently.
        assert shown.split() == help_of(command, capsys, monkeypatch).split(), f"run python {__file__}"


def rewrite():
    import contextlib
    import io
    import os

    sys.path.insert(0, str(PAGE.parents[2] / "python"))
    os.environ["COLUMNS"] = COLUMNS
    from sglang.srt.lk import cli

    def block(match):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main(match[1].split()[1:])
        return f"```console\n$ {match[1]}\n{out.getvalue()}```"

    PAGE.write_text(BLOCK.sub(block, PAGE.read_text()))


if __name__ == "__main__":
    rewrite()
