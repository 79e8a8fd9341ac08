"""Thousands of requests of random length against a server of the recite model, some of them cancelled half way.

Every answer is known: a request is a prompt of ``expected.json`` with the first so many of its tokens already given, and
must go on with the next ones. Only prompts whose two best tokens never come closer than ``MARGIN`` are used, so that the
answers do not hang on the company they are computed in (serve with ``--dtype float32``, as the quick start does). Each
prompt is asked alone first; then ``--requests`` of them, or as many as fit ``--seconds``, ``--at-once`` at a time, while the
memory of the server's processes is watched. ``--stop`` lets all of them stand still for a while after the middle.

``python soak.py FORM`` starts the server itself, with ``--gpu`` beside a GPU; ``--port`` and ``--pid`` take one that runs.
Ends with one line and, with ``--json FILE``, the figures; exit status 0 only if every answer came, was right, and memory
stayed flat.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch import client, recite  # noqa: E402

import recite_server  # noqa: E402

MARGIN = 0.05
# What an allocator may still gain after the warm-up without being called a leak.
FLAT_MB, FLAT_SHARE = 32, 0.02
JUDGED = {"own": "memory", "locked": "locked memory", "pinned": "pinned memory", "gpu": "memory on the GPU"}
SHARES = dict(warm=0.1, middle=0.55, end=1.0)  # of the work, after which memory is looked at
LONGEST = 48
REQUESTS, HOUR_S = 10_000, 3600  # unless the arguments say otherwise


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


def cases(texts: list, number: int | None, *, cancelled: float, seed: int) -> Iterator[Case]:
    """So many, or without end."""
    draw = random.Random(seed)
    for _ in itertools.count() if number is None else range(number):
        ids, answer = draw.choice(texts)
        given = draw.randrange(0, LONGEST - 1)
        length = draw.randint(1, LONGEST - given)
        cancel = draw.randint(1, length) if length > 1 and draw.random() < cancelled * LONGEST / (LONGEST - 1) else None
        yield Case(ids + answer[:given], answer[given : given + length], cancel)


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


def drive(port: int, work: Iterable[Case], at_once: int, deadline: float, tally: Tally) -> None:
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
    deadline = start + (arguments.seconds or HOUR_S)
    alone, tally = Tally(), Tally()
    memory = dict(start=recite_server.memory_mb(pid))
    with reports(arguments.report, start, pid, tally):
        drive(port, [Case(ids, answer) for ids, answer in texts], 1, deadline, alone)
        work, begun = cases(texts, arguments.requests, cancelled=arguments.cancelled, seed=arguments.seed), time.monotonic()
        asked = 0
        for when, share in SHARES.items():
            part, until = work, begun + share * (deadline - begun)
            if arguments.requests:
                part, until = itertools.islice(work, round(share * arguments.requests) - asked), deadline
                asked = round(share * arguments.requests)
            with still(pid, arguments.stop if when == "end" else 0):
                drive(port, part, arguments.at_once, until, tally)
            memory[when] = recite_server.memory_mb(pid)
    at_rest = recite_server.comes_to_rest(port)
    problems = [
        *(f"alone: {text}" for text in alone.wrong + alone.failed),
        *tally.wrong,
        *tally.failed,
        *([] if at_rest else ["requests are left in the scheduler"]),
        *growth(memory["warm"], memory["end"]),
        *([] if tally.done >= (arguments.requests or 1) else [f"{tally.done} requests done within {deadline - start:.0f} s"]),
    ]
    return dict(
        requests=tally.done, cancelled=tally.cancelled, wrong=len(tally.wrong), failed=len(tally.failed), tokens=tally.tokens,
        alone=alone.done, at_once=arguments.at_once, stopped=arguments.stop, seconds=round(time.monotonic() - start, 1),
        memory_mb=memory, at_rest=at_rest, problems=problems,
    )  # fmt: skip


def growth(warm: dict, end: dict) -> list[str]:
    """What grew by more than an allocator may still gain."""
    return [
        f"{name} grew from {warm[key]} to {end[key]} MB"
        for key, name in JUDGED.items()
        if key in warm and key in end and end[key] - warm[key] > max(FLAT_MB, FLAT_SHARE * warm[key])
    ]


@contextlib.contextmanager
def still(pid: int, seconds: float) -> Iterator[None]:
    """The server stands still for a while, soon after what is inside has begun."""

    def stop() -> None:
        time.sleep(1)
        with recite_server.stopped(pid):
            time.sleep(seconds)

    thread = threading.Thread(target=stop)
    if seconds:
        thread.start()
    try:
        yield
    finally:
        if seconds:
            thread.join()


@contextlib.contextmanager
def reports(every: float, start: float, pid: int, tally: Tally) -> Iterator[None]:
    """A line on stderr every so many seconds; 0: none."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(every):
            sizes = ", ".join(f"{name} {size}" for name, size in recite_server.memory_mb(pid).items())
            with tally.lock:
                found = f"{tally.done} requests, {tally.tokens} tokens, {len(tally.wrong)} wrong, {len(tally.failed)} failed"
            sys.stderr.write(f"soak: {time.monotonic() - start:.0f} s: {found}; MB: {sizes}\n")

    thread = threading.Thread(target=report)
    if every:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if every:
            thread.join()


def line(figures: dict) -> str:
    memory = ", ".join(f"{m['own']} {when}" for when, m in figures["memory_mb"].items())
    others = ", ".join(f"{name} {size}" for name, size in figures["memory_mb"]["end"].items() if name != "own")
    stop = f" and a stop of {figures['stopped']:g} s" if figures["stopped"] else ""
    verdict = "ok" if not figures["problems"] else f"{len(figures['problems'])} problems, first: {figures['problems'][0]}"
    return (
        f"soak: {figures['requests']} requests ({figures['cancelled']} cancelled), {figures['at_once']} at a time, "
        f"{figures['tokens']} tokens in {figures['seconds']} s{stop}; {figures['wrong']} wrong, {figures['failed']} failed; "
        f"the server's own memory in MB: {memory} (at the end {others}): {verdict}"
    )


@contextlib.contextmanager
def beside_a_gpu() -> Iterator[tuple[int, int]]:
    """Process and port of a server as the tests on a GPU start it; the end of its log is shown if it ends by itself."""
    sys.path.append(str(ROOT / "test" / "gpu"))
    import servers

    threads = int(os.environ.get("LK_THREADS", 2))
    with tempfile.TemporaryDirectory() as folder, servers.serve([servers.CPU], Path(folder), threads=threads) as up:
        ready, started = up[servers.CPU.name]
        if not ready:
            raise SystemExit(f"the server did not come up; its log ends:\n{started.tail()}")
        try:
            yield started.process.pid, started.port
        finally:
            if started.process.poll() is not None:
                sys.stderr.write(started.tail())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("form", nargs="?", choices=sorted(recite.FORMS), help="start a server of the recite model in this form")
    parser.add_argument("--stock", action="store_true", help="with the switch off, to compare")
    parser.add_argument("--gpu", action="store_true", help="start one of bf16 on a GPU, all experts on LK_THREADS threads of the CPU")
    parser.add_argument("--port", type=int, help="of a running server")
    parser.add_argument("--pid", type=int, help="of that server's first process")
    parser.add_argument("--requests", type=int, help=f"as many as fit --seconds if that is given, {REQUESTS} if neither is")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--cancelled", type=float, default=0.05, help="share of requests that hang up half way")
    parser.add_argument("--seconds", type=float, help=f"end then, whatever is done; {HOUR_S} by default")
    parser.add_argument("--stop", type=float, default=0, metavar="S", help="let the server's processes stand still for S seconds")
    parser.add_argument("--report", type=float, default=0, metavar="S", help="say every S seconds how it goes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (arguments.form is not None) + arguments.gpu + (arguments.port is not None and arguments.pid is not None) != 1:
        parser.error("give one of: a form to serve, --gpu, --port and --pid of a running server")
    if arguments.requests is None and arguments.seconds is None:
        arguments.requests = REQUESTS
    texts = known(recite.MODEL, recite.MODEL / "tokenizer.json")
    with contextlib.ExitStack() as stack:
        pid, port = arguments.pid, arguments.port
        if arguments.form:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            recite.make(arguments.form, model)
            server = stack.enter_context(recite_server.serve(model, hybrid=not arguments.stock))
            pid, port = server.pid, server.port
        elif arguments.gpu:
            pid, port = stack.enter_context(beside_a_gpu())
        figures = soak(port, pid, texts, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(line(figures) + "\n")
    return bool(figures["problems"])


if __name__ == "__main__":
    sys.exit(main())
