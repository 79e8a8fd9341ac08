"""Nothing outlives us, whatever the children do and whenever the signal comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import processes

ROOT = Path(__file__).resolve().parents[2]

# Three generations: a child that ignores SIGTERM, whose own child left the session and lost its parent.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(os.environ["MARK"] + ".orphan", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
open(os.environ["MARK"], "w").write(str(os.getpid()))
time.sleep(600)
"""

PROGRAM = """
import os, sys, time
from pathlib import Path
from launch import processes, progress
processes.PATIENCE_S = 0.5
processes.own_descendants()
try:
    progress.run("step", [sys.executable, "-c", os.environ["CHILD"]], log=Path(os.environ["MARK"] + ".log"),
                 environ=dict(os.environ), folder=Path("."))
except processes.Stopped as stopped:
    sys.exit(stopped.status)
finally:
    processes.end_all()
"""


def alive(pid: int) -> bool:
    return pid in processes.parents()


def read_pid(path: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_step_ends_children_orphans_and_the_stubborn(tmp_path, number):
    mark = tmp_path / "mark"
    environ = os.environ | {"CHILD": STUBBORN, "MARK": str(mark), "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.DEVNULL)
    pids = [read_pid(mark), read_pid(mark.with_name("mark.orphan"))]
    assert all(map(alive, pids))
    program.send_signal(number)
    assert program.wait(60) == 128 + number
    assert not any(map(alive, pids))


def test_a_second_signal_does_not_break_the_clean_up(tmp_path):
    mark = tmp_path / "mark"
    environ = os.environ | {"CHILD": STUBBORN, "MARK": str(mark), "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.DEVNULL)
    pids = [read_pid(mark), read_pid(mark.with_name("mark.orphan"))]
    program.send_signal(signal.SIGINT)
    time.sleep(0.1)
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 128 + signal.SIGINT
    assert not any(map(alive, pids))


def test_children_end_when_we_are_killed_outright(tmp_path):
    mark = tmp_path / "mark"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    environ = os.environ | {"CHILD": child, "MARK": str(mark), "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.DEVNULL)
    pid = read_pid(mark)
    program.kill()
    program.wait()
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
