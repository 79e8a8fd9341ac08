"""Prompts in, token ids and times out, over the server's streaming `/generate`.

Ids rather than text are compared, because two different token sequences may spell the same text. Greedy decoding
only. Nothing here starts or judges a server.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

TIMEOUT_S = 300


class RequestFailed(RuntimeError):
    """The server answered with an error, or the stream ended early."""


@dataclass(frozen=True)
class Answer:
    """``arrivals`` holds one (seconds since the request, tokens so far) pair per chunk."""

    ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def decode_s(self) -> float:
        return self.arrivals[-1][0] - self.first_s

    @property
    def decoded(self) -> int:
        return self.arrivals[-1][1] - self.arrivals[0][1]


@contextmanager
def post(port: int, body: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"the server on port {port} broke the connection ({error})") from error
    finally:
        connection.close()


def chunks(response: http.client.HTTPResponse) -> Iterator[dict]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        text = line.removeprefix(b"data:").strip()
        if text == b"[DONE]":
            return
        chunk = json.loads(text)
        if "error" in chunk:
            raise RequestFailed(chunk["error"].get("message", str(chunk["error"])))
        yield chunk
    raise RequestFailed("the stream ended before its end mark")


def generate(port: int, tokens: int, *, prompt: str, seen: Callable[[str], None] = lambda text: None) -> Answer:
    """One greedy request of exactly ``tokens`` tokens; ``seen`` is told the text as it grows."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"text": prompt, "stream": True, "sampling_params": sampling})
    out, arrivals = [], []
    start = time.perf_counter()
    with post(port, body) as response:
        for chunk in chunks(response):
            out = chunk["output_ids"]
            arrivals.append((time.perf_counter() - start, len(out)))
            seen(chunk["text"])
    if len(out) != tokens:
        raise RequestFailed(f"{len(out)} tokens came back instead of {tokens}")
    return Answer(tuple(out), tuple(arrivals))


def generate_all(port: int, prompts: list[str], tokens: int, at_once: int) -> Iterator[Answer]:
    """Answers in the order of the prompts, ``at_once`` requests under way."""
    pool = ThreadPoolExecutor(at_once)
    try:
        yield from pool.map(lambda prompt: generate(port, tokens, prompt=prompt), prompts)
    finally:
        # Not waited for: after an interruption the open requests end with the server.
        pool.shutdown(wait=False, cancel_futures=True)


def prefill(port: int, batch: list[list[int]]) -> float:
    """Seconds until every prompt of one batched request has its first token."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = json.dumps({"input_ids": batch, "sampling_params": sampling})
    start = time.perf_counter()
    with post(port, body) as response:
        answers = json.loads(response.read())
    seconds = time.perf_counter() - start
    if len(answers) != len(batch):
        raise RequestFailed(f"{len(answers)} answers came back for {len(batch)} prompts")
    return seconds
