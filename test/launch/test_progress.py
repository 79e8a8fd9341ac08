"""What a failed step says."""

import os
import sys
from pathlib import Path

import pytest

from launch import progress


def fail(tmp_path: Path, text: str) -> str:
    with pytest.raises(progress.StepFailed) as error:
        code = f"import sys; sys.stdout.write({text!r}); sys.exit(3)"
        progress.run(
            "Baking", [sys.executable, "-c", code], log=tmp_path / "log", environ=dict(os.environ), folder=tmp_path
        )
    return str(error.value)


def test_a_full_disk_is_named_as_such(tmp_path):
    assert "the disk is full" in fail(tmp_path, "Collecting x\nOSError: [Errno 28] No space left on device\n")


def test_the_innermost_error_is_quoted_not_the_wrappers(tmp_path):
    text = "x.cpp:3: error: no such header\nerror: subprocess-exited-with-error\nERROR: Failed building wheel for x\n"
    sentence = fail(tmp_path, text)
    assert sentence.startswith("Baking failed (exit status 3); ")
    assert sentence.endswith("says: x.cpp:3: error: no such header")
    assert "\n" not in sentence


def test_a_silent_failure_still_gives_a_sentence(tmp_path):
    assert fail(tmp_path, "").endswith("says: nothing")


def test_only_the_last_state_of_a_progress_bar_counts(tmp_path):
    (tmp_path / "log").write_text("start\n10%\r50%\r\x1b[K90%\n")
    assert progress.lines(tmp_path / "log")[-1] == "90%"
