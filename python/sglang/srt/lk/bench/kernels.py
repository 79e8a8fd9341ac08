"""Times complete expert calls (gate·up, activation, down, weighted sum) and sets them against the machine.

Every case runs between two looks at the machine: a plain reader over 2 MB pages and the instruction set's dot
product, both with all threads. Weights are several times larger than the caches and rotate, so each call reads
memory. A result that is not finite or is all zero stops the run: a kernel that computes nothing is fast.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np

from sglang.srt.lk import cpus, machine
from sglang.srt.lk.bench import cases, weights
from sglang.srt.lk.bench.cases import Shape

READ_MEGABYTES = 256  # at least; more where the caches are larger
READ_SECONDS = 0.3
DOT_SECONDS = 0.2
CALL_SECONDS = 0.05


@dataclass(frozen=True)
class Plan:
    """What one run measures, and how long."""

    isas: list[str]
    formats: list[str]
    shapes: list[Shape]
    rows: list[str]
    cpus: list[int]
    nodes: int = 1
    seconds: float = 1.0
    repeats: int = 7
    bind: str = "core"
    spin_us: int = 200
    huge: bool = True
    placement: dict = field(default_factory=dict)  # of ``Cpus``
    warnings: list[str] = field(default_factory=list)  # for the user to see


@dataclass(frozen=True)
class Row:
    """One measured case. ``rows`` is tokens in the batch; ratios are shares of what the machine gave around it."""

    isa: str
    format: str
    hidden: int
    width: int
    experts: int
    top_k: int
    rows: int
    threads: int
    seconds: float
    gb_per_s: float
    gflop_per_s: float
    read_gb_per_s: float
    read_ratio: float
    dot_ratio: float
    dot_gflop_per_s: float
    repeats: int
    spread: float
    stored_bytes_ratio: float

    as_dict = asdict


@dataclass
class Buffers:
    """Inputs and output of a call; ``out`` starts poisoned so that an untouched result is seen."""

    x: np.ndarray
    routing: np.ndarray
    out: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.out = np.full(self.x.shape, np.nan, dtype=np.float32)

    @classmethod
    def of(cls, shape: Shape, batch: int) -> Buffers:
        rng = np.random.default_rng(1)
        x = (rng.standard_normal((batch, shape.hidden), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return cls(x, np.full((batch, shape.top_k), 1 / shape.top_k, dtype=np.float32))

    def call(self, layer, ids: np.ndarray) -> None:
        layer.forward(
            self.x.ctypes.data,
            self.x.strides[0],
            "bf16",
            len(self.x),
            ids.ctypes.data,
            ids.strides[0],
            "i32",
            self.routing.ctypes.data,
            self.routing.strides[0],
            ids.shape[1],
            self.out.ctypes.data,
            self.out.strides[0],
            "f32",
        )

    def check(self, what: str) -> None:
        if not np.isfinite(self.out).all() or not self.out.any(axis=1).all():
            raise RuntimeError(f"{what}: the result is not finite or has empty rows, so its speed means nothing")


def run(ext, plan: Plan) -> Iterator[Row]:
    """Measure every case, yielding each as it is done. ``ext`` is the native extension."""
    _check_room(ext, plan)
    with _on_cpu(plan.cpus[0]):
        for isa in plan.isas:
            engine = _engine(ext, plan, isa)
            for shape, fmt in itertools.product(plan.shapes, plan.formats):
                with _fits(f"{fmt} at --shape {shape}"):
                    layers = [weights.make_layer(ext, engine, fmt, shape, seed) for seed in range(_layers(ext, plan, fmt, shape))]
                for rows in plan.rows:
                    with _fits(f"--rows {rows} of {fmt} at --shape {shape}"):
                        row = _measure(engine, plan, layers, fmt, shape, cases.tokens(rows, shape))
                    yield row
                del layers


def call_us(ext, plan: Plan) -> float:
    """What a call costs that has almost nothing to compute: waking the threads and two barriers."""
    with _on_cpu(plan.cpus[0]):
        return _engine(ext, plan, plan.isas[-1]).call_us(seconds=CALL_SECONDS)


def _engine(ext, plan: Plan, isa: str):
    try:
        return ext.Engine(plan.cpus, isa=isa, bind=plan.bind, spin_us=plan.spin_us, huge=plan.huge, **plan.placement)
    except RuntimeError as error:
        raise ValueError(f"{error} (--threads or LK_THREADS sets the number of threads)") from error


@contextmanager
def _on_cpu(cpu: int):
    """The calling thread is the engine's first worker, so it gets that worker's place."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _layers(ext, plan: Plan, fmt: str, shape: Shape) -> int:
    """How many a case goes through."""
    return cases.layers_needed(shape.experts * weights.packed_bytes(ext, fmt, shape), cache_bytes(plan.cpus))


def _check_room(ext, plan: Plan) -> None:
    """``MemoryError`` for what cannot fit, before the first case is measured."""
    room = cpus.memory().available
    if room is None:
        return
    for shape in plan.shapes:
        for fmt in plan.formats:
            needed = _layers(ext, plan, fmt, shape) * shape.experts * weights.packed_bytes(ext, fmt, shape)
            if needed > 0.8 * room:
                raise MemoryError(
                    f"{fmt} at shape {shape} needs {needed / 1e9:.1f} GB of experts so that no cache can hold them, and "
                    f"{room / 1e9:.1f} GB are free; give a --shape with fewer experts"
                )
        for rows in plan.rows:
            needed = cases.buffer_bytes(shape, cases.tokens(rows, shape))
            if needed > 0.8 * room:
                raise MemoryError(
                    f"--rows {rows} at shape {shape} needs {needed / 1e9:.1f} GB for inputs and results, and {room / 1e9:.1f} GB are free; "
                    "give fewer"
                )


@contextmanager
def _fits(what: str):
    try:
        yield
    except MemoryError as error:  # "std::bad_alloc" from the kernels
        raise MemoryError(f"{what} does not fit into memory ({error})") from error


def cache_bytes(cpus: list[int]) -> int:
    return machine.l3_bytes(cpus) or 32 << 20


def _measure(engine, plan: Plan, layers: list, fmt: str, shape: Shape, batch: int) -> Row:
    buffers, routes = Buffers.of(shape, batch), cases.routes(shape, batch)
    # Layer by layer with the same ids, then the next ids: an expert comes round again only after all others.
    calls = itertools.cycle([(layer, ids) for ids in routes for layer in layers])
    before = _machine_now(engine, plan)
    seconds, repeats, spread = _time(lambda: buffers.call(*next(calls)), plan.seconds, plan.repeats)
    after = _machine_now(engine, plan)
    buffers.check(f"{engine.isa} {fmt} {shape}, {batch} rows")
    read, dot = ((a + b) / 2 for a, b in zip(before, after))
    expert_bytes = weights.expert_bytes(fmt, shape)
    distinct = statistics.fmean(len(np.unique(ids)) for ids in routes)
    gb, gflop = distinct * expert_bytes / seconds / 1e9, cases.flops(shape, batch) / seconds / 1e9
    return Row(
        isa=engine.isa,
        format=fmt,
        hidden=shape.hidden,
        width=shape.width,
        experts=shape.experts,
        top_k=shape.top_k,
        rows=batch,
        threads=engine.threads,
        seconds=seconds,
        gb_per_s=gb,
        gflop_per_s=gflop,
        read_gb_per_s=read,
        read_ratio=gb / read,
        dot_ratio=gflop / dot,
        dot_gflop_per_s=dot,
        repeats=repeats,
        spread=spread,
        stored_bytes_ratio=layers[0].bytes / (shape.experts * expert_bytes),
    )


def _machine_now(engine, plan: Plan) -> tuple[float, float]:
    megabytes = machine.read_megabytes(cache_bytes(plan.cpus), READ_MEGABYTES)
    return engine.read_gb_per_s(megabytes=megabytes, seconds=READ_SECONDS), engine.dot_gflop_per_s(seconds=DOT_SECONDS)


def _time(call, seconds: float, repeats: int) -> tuple[float, int, float]:
    """Median seconds of one call over batches of calls, how many batches, and their middle-half spread ÷ median."""
    call()  # the first touches cold pages and sizes buffers
    start = time.perf_counter()
    call()
    one = time.perf_counter() - start
    size = max(1, math.ceil(seconds / repeats / one))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(size):
            call()
        times.append((time.perf_counter() - start) / size)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, repeats, (high - low) / middle
