"""In-process engines, many after each other, without paying for the imports each time.

``python engines.py`` imports SGLang once, then reads one job per line on stdin and answers with one line of JSON on stdout.
Each job is a fork of that process which starts ``sglang.Engine`` (its scheduler and detokenizer are forks, too, where a server
would spawn them), sends the job's batches and ends; the arguments, the loader and the scheduler are those of ``sglang serve``.
The environment of the host process decides whether the hybrid switch is on. ``Host`` is the other end of the pipe.

A job is ``{"model": DIR, "arguments": {…}, "batches": [{…}, …], "log": FILE}``; a batch is the keyword arguments of
``Engine.generate``. The answer is ``{"ready_s": …, "answers": [[…], …]}`` or ``{"error": "…"}`` with the reason out of the log.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

# Small pools and no warm-up: the checkpoints are tiny, the machines are, too.
ARGUMENTS = dict(
    device="cpu", max_total_tokens=4096, context_length=512, max_running_requests=8, skip_server_warmup=True, log_level="info"
)  # fmt: skip


class Host:
    """A process with SGLang imported, ready to fork engines; use it as a context manager."""

    def __init__(self, environment: dict | None = None, python: str = sys.executable):
        own = {"SGLANG_USE_CPU_ENGINE": "1", **(environment or {})}
        self._process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own}, text=True, bufsize=1
        )  # fmt: skip

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait(120)  # a fork of it may still be ending, on a busy machine

    def run(self, model: Path, batches: list[dict], log: Path, timeout: float = 900, **arguments) -> dict:
        job = dict(model=str(model), batches=batches, log=str(log), arguments=arguments, timeout=timeout)
        self._process.stdin.write(json.dumps(job) + "\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine host ended with status {self._process.wait(10)} (see its stderr)")
        return json.loads(line)


def main() -> None:
    import multiprocessing

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry as registry
    from sglang.srt.entrypoints.engine import Engine

    registry.ModelRegistry.get_supported_archs()
    # The engine asks for "spawn"; here the imports are done and no thread runs yet, so that a fork is safe.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    for line in sys.stdin:
        answers.write(json.dumps(_fork(json.loads(line), Engine)) + "\n")


def _fork(job: dict, engine_class) -> dict:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        _child(job, engine_class, write)
    os.close(write)
    result = _read(read, time.monotonic() + job["timeout"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if result:
        return json.loads(result)
    return {"error": reason(Path(job["log"]).read_text(errors="replace"))}


def _child(job: dict, engine_class, write: int) -> None:
    log = os.open(job["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    start = time.monotonic()
    engine = engine_class(model_path=job["model"], **{**ARGUMENTS, **job["arguments"]})
    ready = time.monotonic() - start
    answers = []
    for batch in job["batches"]:
        answer = engine.generate(**batch)
        answers.append(answer if isinstance(answer, list) else [answer])
    os.write(write, json.dumps(dict(ready_s=round(ready, 2), answers=answers)).encode() + b"\n")
    os._exit(0)


def _read(pipe: int, deadline: float) -> bytes:
    """One line, or nothing when every writer is gone or the deadline passes first."""
    data = b""
    while not data.endswith(b"\n") and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            break
        data += chunk
    os.close(pipe)
    return data if data.endswith(b"\n") else b""


def reason(log: str) -> str:
    """Our own one message if there is one, else the innermost error of the first traceback, with the place it came from."""
    refusal = re.search(r"^(?:\[.*?\] )?(Hybrid MoE: .*(?:\n[ \t]+.*)*)", log, re.M)
    if refusal and "Traceback" not in log:
        return " ".join(refusal[1].split())
    places, found = [], ""
    for line in log.splitlines():
        place = re.match(r'\s+File ".*?/(sglang/[^"]+|[^"/]+)", line (\d+), in (\S+)', line)
        if place:
            places.append("{}:{} {}".format(*place.groups()))
        elif places and re.match(r"(\[.*?\] )?[\w.]*(Error|Exception|Exit|Interrupt)\b", line):
            found = line
            break
    if not found:
        return "no traceback; the log ends: " + " | ".join(log.splitlines()[-3:])
    upstream = [place for place in places if place.startswith("sglang/")]
    return f"{found.strip()} (at {(upstream or places)[-1]})"


if __name__ == "__main__":
    main()
