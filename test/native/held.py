"""A thread held still from outside, as a debugger does it, so that tests see what a stalled thread causes."""

import ctypes
import subprocess
import sys

import pytest


class Held:
    """``with Held(tid)``: the thread stands still inside. Its tracer is a process of its own, so that the test goes on; a
    thread of this process can be held by a child only."""

    def __init__(self, tid: int):
        self.tid = tid

    def __enter__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)  # PR_SET_PTRACER_ANY, where Yama asks
        self.child = subprocess.Popen([sys.executable, "-c", _HOLD, str(self.tid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.child.stdout.readline() != b"held\n":
            self.child.wait()
            pytest.skip("this machine lets no process trace another")

    def __exit__(self, *_):
        self.child.communicate(b"\n")


_HOLD = """
import ctypes, os, sys
tid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
if libc.ptrace(16, tid, None, None):
    sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(tid, 0x40000000)
sys.stdout.write("held\\n"); sys.stdout.flush()
sys.stdin.readline()
libc.ptrace(17, tid, None, None)
"""
