"""One `sglang serve`, from start to gone. Stock and hybrid differ in the environment alone: every flag is the same.

The flags keep start-up short and the comparison fair: a small KV cache (upstream's default fills the memory), no
warm-up request of its own, and no radix cache, so that a repeated prompt is computed again. A scheduler with nothing to do
sleeps; else it takes a core for itself (on two cores 16 prompts took 134 s beside an idle server instead of 2.6).
Activations are ``float32`` on a CPU and ``float16`` on a GPU, whose kernels upstream does not have in float32: the weights
are exact in both, and greedy tokens do not hang on the rounding of logits (bf16 logits near 40 are 0.25 apart, which is
more than the margin between many best and second-best tokens).
"""

import http.client
import os
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from launch import processes, progress

READY_S = 600
DEVICE_FLAGS = {
    "cpu": ("--device", "cpu", "--dtype", "float32"),
    "cuda": ("--device", "cuda", "--dtype", "float16"),
}
FLAGS = (
    *("--context-length", "4096"),
    *("--max-total-tokens", "16384"),
    *("--max-running-requests", "16"),
    *("--chunked-prefill-size", "4096"),
    "--disable-radix-cache",
    "--skip-server-warmup",
    "--sleep-on-idle",
)
SWITCH = {"LK_MOE_HYBRID_ENABLED": "1"}


def environment(base: dict[str, str], *, hybrid: bool, device: str) -> dict[str, str]:
    """What the server sees: the user's own ``LK_`` settings in hybrid mode, none of them in stock mode."""
    keep = {name: value for name, value in base.items() if hybrid or not name.startswith(("LK_", "LVLLM_"))}
    for name in ("LK_VENV", "PYTHONPATH"):
        keep.pop(name, None)
    keep["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        keep |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return keep | (SWITCH if hybrid else {})


@dataclass
class Server:
    """``started`` is on the monotonic clock; ``ready_s`` is known after ``wait``."""

    label: str
    port: int
    log: Path
    process: Popen
    started: float
    ready_s: float = 0.0

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def wait(self) -> None:
        """Returns when the server has answered a health check, which runs the model once."""
        line = progress.Line(f"Starting {self.label}")
        while not self.answers():
            if self.process.poll() is not None:
                raise progress.StepFailed(
                    f"{self.label} stopped while starting (exit status {self.process.returncode});"
                    f" {progress.reason(self.log)}"
                )
            if time.monotonic() - self.started > READY_S:
                raise progress.StepFailed(f"{self.label} was not ready after {READY_S} s; see {self.log}")
            # Upstream's own log lines start with the time in brackets; the others are warnings of libraries.
            line.show(next((text for text in reversed(progress.lines(self.log)) if text.startswith("[20")), ""))
            time.sleep(0.2)
        self.ready_s = time.monotonic() - self.started
        line.done()

    def stop(self) -> None:
        processes.end_tree(self.process)


def start(*, label: str, venv: Path, model: Path, port: int, hybrid: bool, device: str, logs: Path) -> Server:
    log = logs / f"{label.lower().replace(' ', '-')}.log"
    command = [str(venv / "bin" / "sglang"), "serve", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *DEVICE_FLAGS[device], *FLAGS]
    environ = environment(dict(os.environ), hybrid=hybrid, device=device)
    process = processes.start(command, log=log, environ=environ, folder=logs)
    return Server(label=label, port=port, log=log, process=process, started=time.monotonic())
