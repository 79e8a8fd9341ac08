"""What it costs to hand a layer's rows to the CPU and back, inside a CUDA graph.

Two graphs of the same GPU work, one of them with a hand-over in every layer; what the CPU says it computed is taken off
the difference. The experts are as small as they come, so that what is left is the way there and back. Needs a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from sglang.srt.lk.config import Config
from sglang.srt.lk.term import table

TOP_K = 8
WIDTH = 16
REPLAYS = (3, 50)  # of one graph in a sample, at least and at most
SAMPLE_S = 0.1  # what a sample should not exceed by much


@dataclass(frozen=True)
class Row:
    """Microseconds per layer; ``cost`` is ``with_`` less ``without`` and ``cpu``, ``spread`` its middle half over samples."""

    way: str
    hidden: int
    rows: int
    layers: int
    without: float
    with_: float
    cpu: float
    cost: float
    spread: float

    as_dict = asdict


def run(*, settings: Config, hidden: int, rows: list[int], layers: int, samples: int) -> Iterator[Row]:
    """Measure the mailbox and host functions at every number of rows, on the CPUs and threads of ``settings``."""
    import torch

    from sglang.srt.lk import handover, kernels
    from sglang.srt.lk.formats import Packing

    if not torch.cuda.is_available():
        raise ValueError("bench handover needs an NVIDIA GPU, and torch sees none")
    engine = kernels.engine(config=settings, gpu=True)
    activation = kernels.Activation()
    experts = kernels.Experts(engine, packing=Packing("bf16"), experts=TOP_K, hidden=hidden, width=WIDTH, activation=activation, bias=False)
    weights = (torch.randn(hidden, hidden) * 0.02).to(torch.bfloat16)
    for expert in range(TOP_K):
        experts.pack_codes(expert, "gate", weights[:WIDTH])
        experts.pack_codes(expert, "up", weights[:WIDTH])
        experts.pack_codes(expert, "down", weights[:, :WIDTH])
    sizes = handover.Sizes(rows=max(rows), hidden=hidden, top_k=TOP_K)
    spin_us, bind = 0 if settings.power_saving else 2000, settings.thread_binding == "CPU_CORE"
    for mailbox in (True, False):
        hand = handover.Handover(
            sizes=sizes, device=torch.device("cuda"), mailbox=mailbox, engine=engine, spin_us=spin_us, bind=bind
        )
        try:
            for count in rows:
                yield _measure(hand, experts, "mailbox" if mailbox else "host functions", count, layers, samples)
        finally:
            hand.native.close()


def _measure(hand, experts, way: str, rows: int, layers: int, samples: int) -> Row:
    import torch

    x = torch.randn((rows, experts.hidden), device="cuda").to(torch.bfloat16)
    ids = torch.arange(TOP_K, dtype=torch.int32, device="cuda").repeat(rows, 1)
    weights = torch.full((rows, TOP_K), 1 / TOP_K, device="cuda")
    real = torch.full((1,), rows, dtype=torch.int32, device="cuda")  # as the graphs of a server have it

    def step(handed: bool):
        y = x
        for _ in range(layers):
            y = y + 1  # the layer's other work, the same in both graphs
            if handed:
                y = hand.forward(experts, y, ids, weights, name="experts", real=real)
        return y

    plain, handed = _capture(step, False), _capture(step, True)
    without, with_, cpu = [], [], []
    for _ in range(samples):
        without.append(_time(plain) / layers)
        before = hand.native.stats()
        with_.append(_time(handed) / layers)
        after = hand.native.stats()
        cpu.append((after["busy_us"] - before["busy_us"]) / (after["calls"] - before["calls"]))
    if not torch.isfinite(handed.result).all() or not handed.result.any():
        raise RuntimeError("the result is not finite or zero, so its speed means nothing")
    costs = [a - b - c for a, b, c in zip(with_, without, cpu)]
    low, cost, high = statistics.quantiles(costs, n=4)
    middle = (statistics.median(values) for values in (without, with_, cpu))
    return Row(way, experts.hidden, rows, layers, *middle, cost, high - low)


def _capture(step, handed: bool):
    import torch

    step(handed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.result = step(handed)
    return graph


def _time(graph) -> float:
    """Microseconds of one replay, over many that follow each other."""
    one = _span(graph, 1) / 1e6
    replays = max(REPLAYS[0], min(REPLAYS[1], int(SAMPLE_S / one)))
    return _span(graph, replays) / replays


def _span(graph, replays: int) -> float:
    """Microseconds from the first of some replays to the end of the last, on the GPU's clock."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000


def lines(rows: list[Row]) -> list[str]:
    head = ["way", "hidden", "rows", "without", "with", "CPU", "hand-over", "spread"]
    cells = [
        [row.way, str(row.hidden), str(row.rows), *(f"{value:.1f} µs" for value in (row.without, row.with_, row.cpu, row.cost, row.spread))]
        for row in rows
    ]
    return table([head, *cells], "<>>>>>>>")
