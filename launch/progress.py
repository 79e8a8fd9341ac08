"""One line that shows that a long step is alive: what it does, for how long, and its log's last words.

On a terminal the line is rewritten; elsewhere a new one comes every few seconds.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch import processes

EVERY_S = {True: 0.5, False: 5.0}  # by whether this is a terminal
TAIL_BYTES = 4096


class StepFailed(RuntimeError):
    """A step could not be done; the text is one sentence for the user."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def lines(log: Path) -> list[str]:
    """The last lines of a log that say something, progress bars undone."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    parts = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).strip() for part in re.split(r"[\r\n]+", text))
    return [part for part in parts if part]


class Line:
    """The line of one step. ``show`` often: it decides itself when to print."""

    def __init__(self, label: str) -> None:
        self.label, self.start, self.terminal = label, time.monotonic(), sys.stdout.isatty()
        self.next = self.start + EVERY_S[self.terminal] if not self.terminal else self.start

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def show(self, detail: str) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + EVERY_S[self.terminal]
        text = f"  {self.label} … {self.elapsed:.0f} s"
        if detail:
            text += f"  {detail}"
        width = shutil.get_terminal_size((120, 24)).columns - 1
        if self.terminal:
            sys.stdout.write("\r\x1b[K" + text[:width])
            sys.stdout.flush()
        else:
            say(text[:width])

    def done(self, result: str = "") -> float:
        if self.terminal:
            sys.stdout.write("\r\x1b[K")
        say(f"  {self.label}: {self.elapsed:.1f} s{result and ', ' + result}")
        return self.elapsed


def watch(label: str, process: subprocess.Popen, log: Path, detail: Callable[[list[str]], str]) -> float:
    """Shows a child until it ends; its failure becomes ``StepFailed``."""
    line = Line(label)
    while process.poll() is None:
        line.show(detail(lines(log)))
        time.sleep(0.1)
    if process.returncode != 0:
        raise StepFailed(f"{label} failed (exit status {process.returncode}); {reason(log)}")
    return line.done()


HINTS = (
    ("No space left on device", "the disk is full: free some space and start again"),
    ("MemoryError", "memory ran out: end other programs and start again"),
    ("Temporary failure in name resolution", "the package index cannot be reached: check the network or pip's settings"),
    ("Could not find a version that satisfies", "the package index lacks a package: check the network or pip's settings"),
    ("address already in use", "the port is taken: set QUICKSTART_PORT to a free one"),
)


# Lines that only say that something inside failed.
WRAPPERS = ("subprocess-exited-with-error", "Failed building wheel", "Could not build wheels", "originates from a subprocess")


def reason(log: Path) -> str:
    """Why the program behind this log failed, as well as the log tells."""
    text = log.read_text(errors="replace") if log.exists() else ""
    for mark, hint in HINTS:
        if mark.lower() in text.lower():
            return f"{hint} ({log} has the details)"
    said = [line.strip() for line in text.splitlines() if re.search(r"error\b.*:|\bLK_", line, re.IGNORECASE)]
    said = [line for line in said if not any(wrapper in line for wrapper in WRAPPERS)]
    last = (said or lines(log) or ["nothing"])[-1]
    return f"{log} says: {last[:300]}"


def run(
    label: str,
    command: list[str],
    *,
    log: Path,
    environ: dict[str, str],
    folder: Path,
    detail: Callable[[list[str]], str] = lambda tail: tail[-1] if tail else "",
) -> float:
    """Runs a command to its end, visibly. Returns its seconds."""
    return watch(label, processes.start(command, log=log, environ=environ, folder=folder), log, detail)
