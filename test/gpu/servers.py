"""Servers of the recite model on a GPU, several at a time, and what can be asked of them.

They share the card: each holds a few hundred megabytes. ``GPU_SERVE_FLAGS`` adds flags that a host needs (another attention
backend, for instance). Nothing here knows a right answer.
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "test" / "serving")]

from launch import processes, recite  # noqa: E402

from recite_server import stopped  # noqa: E402, F401

FLAGS = (
    "--device", "cuda", "--dtype", "float16", "--enable-fp32-lm-head", "--host", "127.0.0.1", "--skip-server-warmup",
    "--context-length", "512", "--max-total-tokens", "8192", "--max-running-requests", "32", "--chunked-prefill-size", "64",
    "--cuda-graph-max-bs-decode", "32", "--moe-runner-backend", "triton",
    "--sleep-on-idle",  # several share the processors, and an idle scheduler would take one
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to serve: environment and flags."""

    name: str
    environ: dict = field(default_factory=dict)
    flags: tuple[str, ...] = ()


STOCK = Way("stock", {"LK_MOE_HYBRID_ENABLED": "0"})
RESIDENT = Way("resident", {"LK_GPU_RESIDENT_MOE_LAYERS": "0-3"})
CPU = Way("cpu", flags=("--enable-metrics",))
EAGER = Way("cpu, no graphs", flags=("--disable-cuda-graph",))
FUNCTIONS = Way("cpu, host functions", {"LK_HF_MBOX": "0"}, flags=("--enable-metrics",))
MIXED = Way("mixed", {"LK_GPU_RESIDENT_MOE_LAYERS": "0,2"})
TP = Way("cpu, two GPUs", flags=("--tp-size", "2"))
MIXED_TP = Way("mixed, two GPUs", {"LK_GPU_RESIDENT_MOE_LAYERS": "1"}, flags=("--tp-size", "2"))
NEXTN = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
DRAFTS_CPU = Way("drafts on the CPU", flags=NEXTN)
DRAFTS_RESIDENT = Way("drafts resident", {"LK_GPU_RESIDENT_MOE_LAYERS_MTP": "0"}, NEXTN)
DRAFTS_EAGER = Way("drafts without graphs", flags=(*NEXTN, "--disable-cuda-graph"))
LOOKED_UP = Way("drafts from n-grams", flags=NGRAM)


@dataclass
class Server:
    way: Way
    process: subprocess.Popen
    port: int
    log: Path

    def ready(self, patience_s: float = 400) -> bool:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # it does not listen yet
                if ask(self.port, "GET", "/health")[0] == 200:
                    return True
            time.sleep(0.3)
        return False

    def tokens(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy tokens of prompts sent as one batch."""
        return [answer["output_ids"] for answer in self.answers(prompts, count)]

    def answers(self, prompts: list[list[int]], count: int) -> list[dict]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        status, data = ask(self.port, "POST", "/generate", {"input_ids": prompts, "sampling_params": sampling})
        if status != 200:
            raise RuntimeError(f"{self.way.name}: status {status}: {data[:300]!r}")
        return json.loads(data)

    def metric(self, name: str) -> float:
        """Its sum over all ranks, once two looks further apart than the server's own saw the same."""
        last, now = -1.0, self._metric(name)
        while now != last:
            time.sleep(2.5)
            last, now = now, self._metric(name)
        return now

    def _metric(self, name: str) -> float:
        lines = ask(self.port, "GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def tail(self, size: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-size:]


def ask(port: int, method: str, path: str, body: dict | None = None, timeout: float = 120) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def start(way: Way, model: Path, folder: Path, *, threads: int = 2) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "LK_MOE_HYBRID_ENABLED": "1", "LK_THREADS": str(threads), **way.environ}
    command = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve", "--model-path", str(model)]
    more = os.environ.get("GPU_SERVE_FLAGS", "").split()
    log = folder / f"{way.name.replace(', ', '-').replace(' ', '-')}.log"
    process = processes.start([*command, *FLAGS, *more, *way.flags, "--port", str(port)], log=log, environ=environ, folder=folder)
    return Server(way, process, port, log)


@contextlib.contextmanager
def serve(ways: list[Way], folder: Path, *, threads: int = 2):
    """All of them, started together; those that did not come up are None, and their logs say why."""
    model = folder / "recite"
    recite.make("bf16", model)
    add_draft(model / "model.safetensors")
    servers = [start(way, model, folder, threads=threads) for way in ways]
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            up = list(pool.map(Server.ready, servers))
        yield {server.way.name: (server if ready else None, server) for server, ready in zip(servers, up)}
    finally:
        for server in servers:
            processes.end_tree(server.process)


def server(running: dict, way: Way) -> Server:
    """The one of ``serve`` that serves so; it must have come up."""
    ready, started = running[way.name]
    assert ready, f"{way.name} did not come up:\n{started.tail()}"
    return ready


def add_draft(file: Path) -> None:
    """A draft layer (MTP) that guesses badly: the last layer once more, behind the hidden state. Without speculative
    decoding nobody reads it."""
    tensors = recite.read(file)
    last = "model.layers.3."
    tensors |= {name.replace(last, "mtp.layers.0."): tensor for name, tensor in tensors.items() if name.startswith(last)}
    norm = tensors["model.norm.weight"]
    hidden = norm.data.size
    one = np.uint16(0x3F80)
    tensors["mtp.norm.weight"] = norm
    tensors["mtp.fc.weight"] = recite.Tensor("BF16", np.hstack([np.zeros((hidden, hidden), np.uint16), np.eye(hidden, dtype=np.uint16) * one]))
    for name in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{name}.weight"] = recite.Tensor("BF16", np.full(hidden, one))
    recite.write(file, tensors)


def known(least_margin: float = 0.05) -> list[tuple[list[int], list[int]]]:
    """Prompts of the recite model whose answer does not hang on rounding, and the answer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(recite.MODEL / "tokenizer.json"))
    entries = json.loads((recite.MODEL / "expected.json").read_text())
    return [(tokenizer.encode(e["prompt"]).ids, e["output_ids"]) for e in entries if e["min_margin"] >= least_margin]
