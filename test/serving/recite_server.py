"""A real ``sglang serve`` of the recite model for the tests, and what can be asked about it from outside.

Small chunks, a radix cache and a queue, all upstream's; ``float32`` activations, because bf16 logits near 40 are 0.25 apart
and would let rounding choose between tokens. Nothing here knows what a right answer is.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch import processes

FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--skip-server-warmup", "--sleep-on-idle",
    "--context-length", "512", "--max-total-tokens", "8192", "--max-running-requests", "16", "--chunked-prefill-size", "64",
)  # fmt: skip


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen
    port: int
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid


@contextlib.contextmanager
def serve(model: Path, *, hybrid: bool = True, flags: tuple[str, ...] = ()) -> Iterator[Running]:
    """A server of the model on a free port, ended with all its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "LK_MOE_HYBRID_ENABLED": "1" if hybrid else "0"}
    command = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve", "--model-path", str(model)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        process = processes.start([*command, *FLAGS, *flags, "--port", str(port)], log=log, environ=environ, folder=Path(folder))
        try:
            running = Running(process, port, log)
            _wait(running)
            yield running
        finally:
            processes.end_tree(process)


def _wait(server: Running, patience_s: float = 900) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it does not listen yet
            if _ask(server.port, "GET", "/health", timeout=60)[0] == 200:
                return
        time.sleep(0.3)
    raise RuntimeError(f"the server did not become ready; its log ends:\n{server.log.read_text(errors='replace')[-3000:]}")


def get(port: int, path: str) -> tuple[int, bytes]:
    return _ask(port, "GET", path)


def post(port: int, path: str, body: dict) -> dict:
    status, data = _ask(port, "POST", path, json.dumps(body))
    if status != 200:
        raise RuntimeError(f"{path}: status {status}: {data[:500]!r}")
    return json.loads(data)


def _ask(port: int, method: str, path: str, body: str | None = None, timeout: float = 600) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def cpu_seconds(root: int) -> float:
    """Processor time of a process and all below it, so far."""
    ticks = 0
    for pid in {root} | processes.descendants(root):
        with contextlib.suppress(OSError):  # it has just ended
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(root: int) -> dict[str, float]:
    """Resident memory of the server's processes together, and the part of it that is their own: neither files nor
    libraries, whose share changes with whatever else runs on the machine. Also what they lock, pin and have on a GPU."""
    tree = {root} | processes.descendants(root)
    total = dict.fromkeys(("Rss", "Pss_Anon", "Pss_Shmem", "VmLck", "VmPin"), 0)
    for pid in tree:
        for file in ("smaps_rollup", "status"):
            with contextlib.suppress(OSError):  # it ended while we looked
                for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                    name, _, size = line.partition(":")
                    if name in total:
                        total[name] += int(size.split()[0])
    kb = dict(rss=total["Rss"], own=total["Pss_Anon"] + total["Pss_Shmem"], locked=total["VmLck"], pinned=total["VmPin"])
    return {name: round(size / 1024, 1) for name, size in kb.items()} | _gpu_mb(tree)


def _gpu_mb(tree: set[int]) -> dict[str, float]:
    """``gpu``: what these processes have on all GPUs; in a container that hides their numbers ``card``: what anybody has."""
    own = [float(used) for pid, used in _nvidia_smi("--query-compute-apps=pid,used_memory") if int(pid) in tree]
    if own:
        return dict(gpu=sum(own))
    card = [float(used) for (used,) in _nvidia_smi("--query-gpu=memory.used")]
    return dict(card=sum(card)) if card else {}


def _nvidia_smi(query: str) -> list[list[str]]:
    """Rows whose cells are all numbers."""
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if all(cell.isdigit() for cell in row)]


@contextlib.contextmanager
def stopped(root: int) -> Iterator[None]:
    """The server stands still inside: all its processes, as after a Ctrl-Z or on a machine that is suspended."""
    tree = {root} | processes.descendants(root)
    try:
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def under_way(port: int) -> int:
    """Requests that the scheduler runs or keeps waiting."""
    loads = json.loads(get(port, "/v1/loads?include=core")[1])["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def comes_to_rest(port: int, patience_s: float = 300) -> bool:
    """Whether the scheduler empties: cancelled requests must leave nothing behind."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if under_way(port) == 0:
            return True
        time.sleep(0.2)
    return False
