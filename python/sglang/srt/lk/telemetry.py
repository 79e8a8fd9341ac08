"""What the hand-over says of itself while serving: a log line every so many decode steps, and Prometheus metrics.

A thread of its own reads the native counters once a second, so that neither the GPU's nor the CPU's path does anything
for it. With ``--enable-metrics`` the same numbers stand in ``/metrics`` beside upstream's, one series per rank.

A new number is a row of ``COUNTERS`` and a field of the native ``stats``.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Metric -> (help, its value from the native sums).
COUNTERS: dict[str, tuple[str, Callable[[Mapping[str, float]], float]]] = {
    "steps": ("Model steps with CPU experts.", lambda s: s["steps"]),
    "requests": ("Layers handed over to the CPU.", lambda s: s["calls"]),
    "rows": ("Rows handed over, without padding.", lambda s: s["rows"]),
    "cpu_busy_seconds": ("Time the CPU experts computed.", lambda s: s["busy_us"] / 1e6),
    "gpu_wait_seconds": ("Time the GPU's stream waited for the CPU experts; 0 with host functions.", lambda s: s["wait_us"] / 1e6),
    "handover_seconds": ("That time less what the CPU computed; 0 with host functions.", lambda s: max(0.0, s["wait_us"] - s["busy_us"]) / 1e6),
}


Roles = Callable[[], Mapping[str, tuple[int, int]]]


def start(native: Any, *, every: int, metrics: bool, rank: int, roles: Roles) -> threading.Thread:
    """Report on ``native`` (a ``Handover``) until the process ends: a line every ``every`` steps, at most one a second.
    ``roles`` says for a role how many layers have it and how many bytes those are; a draft model's come later."""
    reporters: list[Callable[[Mapping[str, float]], None]] = [Line(every)]
    if metrics:
        reporters.append(Metrics(rank=rank, roles=roles))

    def report() -> None:
        while True:
            if native.failure(ms=int(PERIOD_S * 1000)):
                return
            sums = native.stats()
            for reporter in reporters:
                reporter(sums)

    thread = threading.Thread(target=report, name="lk-telemetry", daemon=True)
    thread.start()
    return thread


class Line:
    """Says what a step cost since the last line, once enough steps have passed."""

    def __init__(self, every: int):
        self.every = every
        self._last: dict[str, float] = {}

    def __call__(self, sums: Mapping[str, float]) -> None:
        if not self._last:
            self._last = dict(sums)
        since = {name: value - self._last[name] for name, value in sums.items()}
        if since["steps"] < self.every:
            return
        self._last = dict(sums)
        logger.info("Hybrid MoE: %s", line(since))


def line(since: Mapping[str, float]) -> str:
    """``[decode]`` with the milliseconds of a step, from the differences of the native sums. Host functions do not know how
    long the GPU waited."""
    steps, ms = since["steps"], 1e3 * since["steps"]
    wait, busy = since["wait_us"], since["busy_us"]
    waited = f", GPU waited {wait / ms:.3f}, handing over {(wait - busy) / ms:.3f} of it" if wait else ""
    return f"[decode] {steps:.0f} steps, {since['rows'] / since['calls']:.1f} rows a layer; ms a step: CPU experts {busy / ms:.3f}{waited}"


class Metrics:
    """Prometheus counters that follow the native sums; upstream's ``/metrics`` collects every process."""

    def __init__(self, *, rank: int, roles: Roles):
        from prometheus_client import Counter, Gauge  # after the launcher has set where processes keep their values

        label = {"tp_rank": str(rank)}
        self._counters = {
            name: Counter(f"sglang_lk_{name}", about, list(label)).labels(**label) for name, (about, _) in COUNTERS.items()
        }
        self._said = dict.fromkeys(COUNTERS, 0.0)
        self._label, self._roles = label, roles
        self._layers = Gauge("sglang_lk_layers", "MoE layers of a role.", ["role", *label], multiprocess_mode="mostrecent")
        about = "Bytes of experts, in host memory (cpu) or on the GPU (resident)."
        self._bytes = Gauge("sglang_lk_expert_bytes", about, ["role", *label], multiprocess_mode="mostrecent")

    def __call__(self, sums: Mapping[str, float]) -> None:
        for role, (count, size) in self._roles().items():
            self._layers.labels(role=role, **self._label).set(count)
            self._bytes.labels(role=role, **self._label).set(size)
        for name, (_, value) in COUNTERS.items():
            now = value(sums)
            if now > self._said[name]:
                self._counters[name].inc(now - self._said[name])
                self._said[name] = now
