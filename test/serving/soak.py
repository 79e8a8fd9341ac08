"""Thousands of requests of random length against a server of the recite model, some of them cancelled half way.

Every answer is known: a request is a prompt of ``expected.json`` with the first so many of its tokens already given, and
must go on with the next ones. Only prompts whose two best tokens never come closer than ``MARGIN`` are used, so that the
answers do not hang on the company they are computed in (serve with ``--dtype float32``, as the quick start does). Each
prompt is asked alone first; then ``--requests`` of them, ``--at-once`` at a time, while the memory of the server's
processes is watched.

``python soak.py FORM`` starts the server itself; ``--port`` and ``--pid`` take one that runs. Ends with one line and, with
``--json FILE``, the figures; exit status 0 only if every answer came, was right, and memory stayed flat.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch import client, recite  # noqa: E402

import recite_server  # noqa: E402

MARGIN = 0.05
# What an allocator may still gain after the warm-up without being called a leak.
FLAT_MB, FLAT_SHARE = 32, 0.02
LONGEST = 48


@dataclass(frozen=True)
class Case:
    """Token ids to send and the ids that must come back; ``cancel_after`` chunks the connection is closed."""

    ids: list[int]
    expected: list[int]
    cancel_after: int | None = None


@dataclass
class Tally:
    """What the workers found; ``lock`` guards all of it."""

    done: int = 0
    cancelled: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def known(model: Path, tokenizer: Path) -> list[tuple[list[int], list[int]]]:
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode
    entries = json.loads((model / "expected.json").read_text())
    return [(encode(e["prompt"]).ids, e["output_ids"]) for e in entries if e["min_margin"] >= MARGIN]


def cases(texts: list, number: int, *, cancelled: float, seed: int) -> list[Case]:
    draw = random.Random(seed)
    result = []
    for _ in range(number):
        ids, answer = draw.choice(texts)
        given = draw.randrange(0, LONGEST - 1)
        length = draw.randint(1, LONGEST - given)
        cancel = draw.randint(1, length) if length > 1 and draw.random() < cancelled * LONGEST / (LONGEST - 1) else None
        result.append(Case(ids + answer[:given], answer[given : given + length], cancel))
    return result


def ask(port: int, case: Case, tally: Tally) -> None:
    """One request; what it found goes to the tally, also when it failed."""
    try:
        if case.cancel_after is not None:
            cut_off(port, case)
            found = None
        else:
            found = pieces(port, case.ids, len(case.expected))[-1]
    except client.RequestFailed as error:
        with tally.lock:
            tally.failed.append(str(error))
        return
    with tally.lock:
        tally.done += 1
        if found is None:
            tally.cancelled += 1
            return
        tally.tokens += len(found)
        if found != case.expected:
            tally.wrong.append(f"{case.ids} -> {found}, expected {case.expected}")


def pieces(port: int, ids: list[int], tokens: int, *, stop_after: int | None = None) -> list[list[int]]:
    """What each chunk of a greedy stream held so far; with ``stop_after`` chunks read, hangs up."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "stream": True, "sampling_params": sampling})
    seen = []
    with client.post(port, body) as response:
        for chunk in client.chunks(response):
            seen.append(chunk["output_ids"])
            if len(seen) == stop_after:
                break
    return seen


def cut_off(port: int, case: Case) -> None:
    """Reads some chunks of a stream that would be long, then hangs up."""
    pieces(port, case.ids, 4 * LONGEST, stop_after=case.cancel_after)


def drive(port: int, work: list[Case], at_once: int, deadline: float, tally: Tally) -> None:
    """Works the list off with ``at_once`` threads, until done, the deadline, or the first twenty failures."""
    queue = iter(work)
    lock = threading.Lock()

    def worker() -> None:
        while time.monotonic() < deadline and len(tally.failed) < 20:
            with lock:
                case = next(queue, None)
            if case is None:
                return
            ask(port, case, tally)

    threads = [threading.Thread(target=worker) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def soak(port: int, pid: int, texts: list, arguments: argparse.Namespace) -> dict:
    start = time.monotonic()
    deadline = start + arguments.seconds
    alone, tally = Tally(), Tally()
    drive(port, [Case(ids, answer) for ids, answer in texts], 1, deadline, alone)
    work = cases(texts, arguments.requests, cancelled=arguments.cancelled, seed=arguments.seed)
    warm = max(arguments.at_once, len(work) // 10)
    parts = [work[:warm], work[warm : (warm + len(work)) // 2], work[(warm + len(work)) // 2 :]]
    memory = [recite_server.memory_mb(pid)]
    for part in parts:
        drive(port, part, arguments.at_once, deadline, tally)
        memory.append(recite_server.memory_mb(pid))
    at_rest = recite_server.comes_to_rest(port)
    warm_mb, end_mb = memory[1]["own"], memory[3]["own"]
    problems = [
        *(f"alone: {text}" for text in alone.wrong + alone.failed),
        *tally.wrong,
        *tally.failed,
        *([] if at_rest else ["requests are left in the scheduler"]),
        *([] if end_mb - warm_mb <= max(FLAT_MB, FLAT_SHARE * warm_mb) else [f"memory grew from {warm_mb} to {end_mb} MB"]),
        *([] if tally.done == len(work) else [f"{tally.done} of {len(work)} requests done within {arguments.seconds} s"]),
    ]
    return dict(
        requests=tally.done, cancelled=tally.cancelled, wrong=len(tally.wrong), failed=len(tally.failed), tokens=tally.tokens,
        alone=alone.done, at_once=arguments.at_once, seconds=round(time.monotonic() - start, 1),
        memory_mb=dict(zip(("start", "warm", "middle", "end"), memory, strict=True)), at_rest=at_rest, problems=problems,
    )  # fmt: skip


def line(figures: dict) -> str:
    memory = ", ".join(f"{m['own']} {when}" for when, m in figures["memory_mb"].items())
    verdict = "ok" if not figures["problems"] else f"{len(figures['problems'])} problems, first: {figures['problems'][0]}"
    return (
        f"soak: {figures['requests']} requests ({figures['cancelled']} cancelled), {figures['at_once']} at a time, "
        f"{figures['tokens']} tokens in {figures['seconds']} s; {figures['wrong']} wrong, {figures['failed']} failed; "
        f"the server's own memory in MB: {memory} (resident in all {figures['memory_mb']['end']['rss']}): {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("form", nargs="?", choices=sorted(recite.FORMS), help="start a server of the recite model in this form")
    parser.add_argument("--stock", action="store_true", help="with the switch off, to compare")
    parser.add_argument("--port", type=int, help="of a running server")
    parser.add_argument("--pid", type=int, help="of that server's first process")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--cancelled", type=float, default=0.05, help="share of requests that hang up half way")
    parser.add_argument("--seconds", type=float, default=3600, help="stop then, done or not")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (arguments.form is None) == (arguments.port is None or arguments.pid is None):
        parser.error("give either a form to serve, or --port and --pid of a running server")
    texts = known(recite.MODEL, recite.MODEL / "tokenizer.json")
    with contextlib.ExitStack() as stack:
        pid, port = arguments.pid, arguments.port
        if arguments.form:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            recite.make(arguments.form, model)
            server = stack.enter_context(recite_server.serve(model, hybrid=not arguments.stock))
            pid, port = server.pid, server.port
        figures = soak(port, pid, texts, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(line(figures) + "\n")
    return bool(figures["problems"])


if __name__ == "__main__":
    sys.exit(main())
