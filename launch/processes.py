"""Children that never outlive us.

Every child starts in a session of its own, so a Ctrl-C at the terminal reaches us alone and we end the children in
order. Grandchildren that lose their parent become ours (Linux's child subreaper), so the process table names all of
them whatever they did, and ``end_all`` leaves none.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Upstream's server lingers after SIGTERM once its children are gone; nothing below us has work worth a longer wait.
PATIENCE_S = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Stopped(BaseException):
    """A signal asked us to stop. Not an ``Exception``: no handler of ordinary errors may keep it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def _stop(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # the clean-up that follows is short and must finish
    raise Stopped(number)


def own_descendants() -> None:
    """Call once, first: signals become ``Stopped``, orphans below us become our children."""
    for number in SIGNALS:
        signal.signal(number, _stop)
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel has no child subreaper (Linux 3.4 or newer is needed)")


def _die_with_parent() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def start(command: list[str], *, log: Path, environ: dict[str, str], folder: Path) -> subprocess.Popen:
    """Starts a command with all of its output in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def parents() -> dict[int, int]:
    """Every live process and its parent (zombies count as gone)."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                # The name may hold spaces and brackets: fields are counted from the last one.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    table[int(entry.name)] = int(fields[1])
    return table


def descendants(root: int) -> set[int]:
    table = parents()
    found, size = {root}, 0
    while len(found) != size:
        size = len(found)
        found |= {child for child, parent in table.items() if parent in found}
    return (found - {root}) & table.keys()


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end(processes: set[int]) -> None:
    """Asks politely, waits, then kills; returns when none of them is left."""
    for number, patience in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, 20)):
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            reap()
            if not processes & parents().keys():
                return
            time.sleep(0.05)
    raise RuntimeError(f"processes {sorted(processes & parents().keys())} did not end")


def end_tree(process: subprocess.Popen) -> None:
    """Ends a child with all that it started."""
    end({process.pid} | descendants(process.pid))
    process.poll()


def end_all() -> None:
    """Ends everything below us, and what that starts meanwhile."""
    while left := descendants(os.getpid()):
        end(left)
    reap()
