"""The process around one engine: takes requests as JSON lines, answers each with one JSON line.

Peers print to standard output as they like, so answers go to a file descriptor of their own. A request that raises is
answered with ``error``; one that kills the process is seen by ``measure``.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from . import cases, engine, formats
from .cases import Shape, Variant

BY_NAME = {variant.name: variant for variant in cases.VARIANTS}
PR_SET_PDEATHSIG = 1
WARM_UP = {4: 2, 2: 1, 1: 0}  # calls that are not counted, by the fewest that are
PATIENCE = 60, 8.0  # calls that only taught the clock something, and seconds, before it is given up


class Worker:
    def __init__(self, name: str, threads: int, cache: Path) -> None:
        self.engine = engine.make(name, threads, cache)
        self.layers: dict[str, list[engine.Layer]] = {}
        self.shape: Shape | None = None
        self.last: dict[str, tuple[int, float]] = {}  # by variant: the tokens and seconds of the case before

    def about(self) -> dict:
        return self.engine.about

    def offers(self, variant: str) -> str:
        return self.engine.offers(BY_NAME[variant])

    def check(self, variant: str) -> dict:
        """The largest relative error of small calls against float64, and what is allowed."""
        chosen, shape = BY_NAME[variant], cases.CHECK_SHAPE
        experts = formats.random_experts(chosen.format, shape, shape.experts, 7, self.engine.quantiser())
        layer = self.engine.layer(chosen, shape, experts)
        worst = 0.0
        for tokens in cases.CHECK_TOKENS:
            x, routing = _inputs(shape, tokens)
            ids = cases.routes(shape, tokens, seed=3)[0]
            bound = layer.bind(x, routing)
            bound.poison()
            self.engine.clock(None).time(bound.at(ids))
            exact = formats.truth(experts, formats.from_bf16(x), ids, routing)
            worst = max(worst, formats.relative_error(bound.out(), exact))
        return {"error": worst, "allowed": chosen.error}

    def load(self, variant: str, shape: list[int], count: int) -> float:
        """Builds ``count`` layers for timing; the seconds it took."""
        start = time.perf_counter()
        chosen, self.shape = BY_NAME[variant], Shape(*shape)
        made = []
        for seed in range(count):
            one = formats.random_experts(chosen.format, self.shape, 1, seed, self.engine.quantiser(), whole=False)
            made.append(self.engine.layer(chosen, self.shape, one * self.shape.experts))
        self.layers[variant] = made
        self.last.pop(variant, None)
        return time.perf_counter() - start

    def drop(self, variant: str) -> None:
        self.layers.pop(variant, None)

    def time(self, variant: str, tokens: int, repeats: int, seconds: float) -> list[float]:
        """Seconds of single calls, at least ``repeats`` (4, 2 or 1) of them and as many as fit into ``seconds``."""
        x, routing = _inputs(self.shape, tokens)
        routes, clock = cases.routes(self.shape, tokens), self.engine.clock(self._guess(variant, tokens))
        bound = [layer.bind(x, routing) for layer in self.layers[variant]]
        bound[-1].poison()
        # Layer by layer with the same ids, then the next ids: an expert comes again only after all others.
        calls = [layer.at(ids) for ids in routes for layer in bound]
        endless = itertools.cycle(calls)
        for _ in range(WARM_UP[repeats]):
            clock.time(next(endless))
        times, misses, start = [], 0, time.perf_counter()
        while len(times) < repeats or time.perf_counter() - start < seconds:
            lasted = clock.time(next(endless))
            if lasted is not None:
                times.append(lasted)
                continue
            misses += 1
            if misses > PATIENCE[0] and time.perf_counter() - start > PATIENCE[1]:
                raise RuntimeError(f"{variant}: the clock found no steady duration in {misses} calls")
        out = bound[-1].out() if len(times) >= len(bound) else None
        if out is not None and (not np.isfinite(out).all() or not out.any(axis=1).all()):
            raise RuntimeError(f"{variant}, {tokens} tokens: the result is not finite or has empty rows")
        self.last[variant] = tokens, statistics.median(times)
        return times

    def _guess(self, variant: str, tokens: int) -> float | None:
        """Seconds of a call after the case before: rather too few than too many, more tokens cost less each."""
        if variant not in self.last:
            return None
        before, seconds = self.last[variant]
        return seconds if tokens == before else 0.93 * seconds * tokens / before

    def machine(self, cache_bytes: int, seconds: float) -> dict:
        return self.engine.machine(cache_bytes, seconds)

    def dot(self, seconds: float) -> float:
        return self.engine.dot(seconds)


def _inputs(shape: Shape, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 patterns ``[tokens, hidden]`` and routing weights ``[tokens, top_k]`` that add up to 1."""
    rng = np.random.default_rng(1)
    x = formats.to_bf16(rng.standard_normal((tokens, shape.hidden), dtype=np.float32))
    routing = rng.uniform(0.5, 1.5, (tokens, shape.top_k)).astype(np.float32)
    return x, routing / routing.sum(axis=1, keepdims=True)


def end_with_parent() -> None:
    """A stopped process outlives the one that stopped it, and its threads may wait awake."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main(name: str, threads: str, cache: str) -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peers print
    worker = Worker(name, int(threads), Path(cache))
    for line in sys.stdin:
        request, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(worker, request)(*arguments)}
        except Exception as error:  # said to the process that asked, which decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
