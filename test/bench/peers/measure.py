"""One run: every engine in a process of its own, checked first, then measured side by side.

The variants of a family lie in memory together. For each number of tokens they take turns, twice, and the plain reader
looks at the machine between any two of them: a case has the reading just before it and just after. All processes but
the one at work are stopped, since the threads of most engines wait awake.

A crash is a result: the variant is left out from that number of tokens on, its engine's process is started again, and
the others are built again as their turn comes. The second crash of an engine in a family leaves it out of that family.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from . import cases, install
from .cases import Limits, Shape, Variant

HERE = Path(__file__).resolve().parent
DOT_SECONDS = 0.3
WORKER = "peers.worker"
MOST_CRASHES = 2  # of one engine in one family and shape
ROOM = 1.4  # memory beside the weights: what they are made from, workspaces


class PeerDied(RuntimeError):
    """The process of an engine ended by itself."""


class PeerRefused(RuntimeError):
    """The engine raised; its words."""


class Process:
    """One engine's process, stopped except while it answers."""

    def __init__(self, engine: str, threads: int, cache: Path, log: Path) -> None:
        self.engine, self.arguments = engine, (engine, threads, cache, log)
        self.log = log.open("ab")
        path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", WORKER, engine, str(threads), str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.about = self.ask("about")

    def ask(self, *request):
        self.child.send_signal(signal.SIGCONT)
        written = os.stat(self.log.name).st_size
        try:
            self.child.stdin.write(json.dumps(request) + "\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerDied(f"{ending(self.child.wait())} at {request[0]}{self._last_words(written)}")
        self.child.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise PeerRefused(answer["error"])
        return answer["answer"]

    def _last_words(self, written: int) -> str:
        """The last line that came after so many bytes: all engines write to the same log, but only this one was awake."""
        said = Path(self.log.name).read_bytes()[written:].decode(errors="replace").strip()
        return f", having said: {said.splitlines()[-1].strip()}" if said else ""

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.log.close()


def ending(status: int) -> str:
    """How a process ended, in words."""
    return f"crashed: status {status}" if status >= 0 else f"crashed: signal {-status} ({signal.strsignal(-status)})"


@dataclass(frozen=True)
class Plan:
    """``seconds`` is what one case may take in one of its two passes, beyond the fewest calls."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    families: tuple[str, ...]
    engines: tuple[str, ...]
    threads: int
    cache: Path
    log: Path
    cache_bytes: int
    seconds: float = 0.1
    read_seconds: float = 0.06
    without: tuple[str, ...] = ()  # patterns of kernels that are not measured
    limits: Limits = field(default_factory=Limits)


@dataclass
class Case:
    """One variant at one shape and number of tokens."""

    variant: Variant
    shape: Shape
    tokens: int
    times: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    left_out: str = ""

    def row(self, dot: float) -> dict:
        """The case as stored; rates are those of the median call, shares those of what the machine gave around it."""
        known = {
            "name": self.variant.name, "engine": self.variant.engine, "family": self.variant.family,
            "format": self.variant.stored or self.variant.format, "bits": cases.bits(self.variant),
            "hidden": self.shape.hidden, "width": self.shape.width, "experts": self.shape.experts,
            "top_k": self.shape.top_k, "tokens": self.tokens,
        }  # fmt: skip
        if self.left_out or not self.times:
            return {**known, "left_out": self.left_out or "nothing was measured"}
        seconds, read = statistics.median(self.times), statistics.fmean(self.reads)
        gb = cases.distinct(self.shape, self.tokens) * cases.expert_bytes(self.variant, self.shape) / seconds / 1e9
        gflop = cases.flops(self.shape, self.tokens) / seconds / 1e9
        quartiles = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else [seconds] * 3
        return {
            **known, "seconds": seconds, "calls": len(self.times), "spread": (quartiles[2] - quartiles[0]) / seconds,
            "gb_per_s": gb, "gflop_per_s": gflop, "read_gb_per_s": read, "read_ratio": gb / read, "dot_ratio": gflop / dot,
        }  # fmt: skip


class Run:
    """The processes, what each variant may do here, and the cases in their order."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan, self.say, self.flags = plan, say, install.cpu_flags()
        self.processes: dict[str, Process] = {}
        self.about: dict[str, dict] = {}  # of every engine that was started
        self.loaded: set[Variant] = set()  # those whose layers are in their engine's process
        self.crashed: set[Variant] = set()  # in the family and shape at work
        self.unfit: dict[str, str] = {}  # variant -> why it cannot be measured on this machine
        self.errors: dict[str, dict] = {}
        self.dot = 0.0

    def process(self, engine: str) -> Process:
        if engine not in self.processes:
            self.processes[engine] = Process(engine, self.plan.threads, self.plan.cache, self.plan.log)
            self.about[engine] = self.processes[engine].about
        return self.processes[engine]

    def restart(self, engine: str) -> None:
        self.loaded = {variant for variant in self.loaded if variant.engine != engine}
        if engine in self.processes:
            self.processes.pop(engine).close()

    def close(self) -> None:
        for engine in list(self.processes):
            self.restart(engine)

    def variants(self, family: str) -> list[Variant]:
        able = [v for v in cases.VARIANTS if v.family == family and v.engine in self.plan.engines]
        return [v for v in able if not any(fnmatch(v.name, pattern) for pattern in self.plan.without)]

    def check(self) -> None:
        """Every variant against float64 on a small case. A peer that is wrong is driven wrongly: no figure of it counts."""
        self.process("lk")  # without ours there is nothing to compare with, so its failure ends the run here
        for variant in (v for family in self.plan.families for v in self.variants(family)):
            self.unfit[variant.name] = why = self._check(variant)
            found = self.errors.get(variant.name, {}).get("error")
            self.say(f"  {variant.name:20} " + (why or f"relative error {found:.1e}"))
        self.unfit = {name: why for name, why in self.unfit.items() if why}

    def _check(self, variant: Variant) -> str:
        missing = [flag for flag in variant.needs if flag not in self.flags]
        if missing:
            return f"the processor lacks {', '.join(missing)}"
        try:
            process = self.process(variant.engine)
            why = process.ask("offers", variant.name)
            if why:
                return why
            self.errors[variant.name] = found = process.ask("check", variant.name)
        except PeerDied as death:
            self.restart(variant.engine)
            return str(death)
        except PeerRefused as refusal:
            return str(refusal)
        if found["error"] > found["allowed"]:
            return f"wrong: relative error {found['error']:.1e}, {found['allowed']:.1e} allowed"
        return ""

    def measure(self) -> Iterator[Case]:
        for shape in self.plan.shapes:
            self.dot = max(self.dot, self.process("lk").ask("dot", DOT_SECONDS))
            for family in self.plan.families:
                yield from self._family(shape, self.variants(family))

    def _family(self, shape: Shape, variants: list[Variant]) -> Iterator[Case]:
        self.crashed = set()
        able, rest = self._load(shape, variants)
        yield from rest
        last: dict[str, float] = {}  # seconds of a call per token, with the fewer tokens before
        for tokens in self.plan.tokens:
            now = [Case(variant, shape, tokens) for variant in able]
            expected = {name: seconds * tokens for name, seconds in last.items()}  # at most
            self._leave_out(now, expected)
            over = {case.variant for case in now if case.left_out}
            self._turns([case for case in now if not case.left_out], expected)
            over |= self.crashed | {case.variant for case in now if case.left_out and self._given_up(case.variant.engine)}
            able = [variant for variant in able if variant not in over]
            last = {case.variant.name: statistics.median(case.times) / tokens for case in now if case.times}
            yield from now
        for variant in self.loaded:
            if variant.engine != "kt":
                self.process(variant.engine).ask("drop", variant.name)
        self.loaded = set()
        self.restart("kt")  # it keeps the memory of layers that are gone

    def _load(self, shape: Shape, variants: list[Variant]) -> tuple[list[Variant], list[Case]]:
        able, rest = [], []
        self._require_memory(shape, [v for v in variants if v.name not in self.unfit])
        for variant in variants:
            why = self.unfit.get(variant.name) or variant.refuses(shape, self.flags) or self._given_up(variant.engine)
            if not why:
                try:
                    self._build(variant, shape)
                except PeerRefused as refusal:
                    why = str(refusal)
                except PeerDied as death:
                    why = self._bury(variant, death)
            if why:
                rest += [Case(variant, shape, tokens, left_out=why) for tokens in self.plan.tokens]
            else:
                able.append(variant)
        return able, rest

    def _build(self, variant: Variant, shape: Shape) -> bool:
        """The layers of a variant, if its process does not have them; whether it had to."""
        if variant in self.loaded:
            return False
        count = cases.layers(variant, shape, self.plan.cache_bytes)
        self.process(variant.engine).ask("load", variant.name, [*vars(shape).values()], count)
        self.loaded.add(variant)
        return True

    def _bury(self, variant: Variant, death: PeerDied) -> str:
        """What is said of a variant that ended its process; the next request starts another one."""
        self.crashed.add(variant)
        self.restart(variant.engine)
        return str(death)

    def _given_up(self, engine: str) -> str:
        """Why an engine is not asked again in this family, or nothing."""
        often = sum(variant.engine == engine for variant in self.crashed) >= MOST_CRASHES
        return f"{engine} crashed twice with this format and shape" if often else ""

    def _require_memory(self, shape: Shape, variants: list[Variant]) -> None:
        needed = sum(cases.layer_bytes(variant, shape, self.plan.cache_bytes) for variant in variants) * ROOM
        free = available_bytes()
        if needed > free:
            raise MemoryError(
                f"shape {shape}, {variants[0].family}: {len(variants)} kernels need {needed / 1e9:.1f} GB side by side and "
                f"{free / 1e9:.1f} are free; name fewer with --engine or another --shape"
            )

    def _leave_out(self, now: list[Case], expected: dict[str, float]) -> None:
        for case in now:
            case.left_out = self._given_up(case.variant.engine)
        peers = [expected[c.variant.name] for c in now if c.variant.engine != "lk" and c.variant.name in expected]
        for case in now:
            if not case.left_out and peers and case.variant.name in expected:
                case.left_out = cases.left_out(
                    case.variant, case.tokens, expected[case.variant.name], min(peers), self.plan.limits
                )

    def _turns(self, now: list[Case], expected: dict[str, float]) -> None:
        read = self._read()
        for turn in range(2):
            for case in now:
                few = cases.repeats(expected.get(case.variant.name, 0.0), self.plan.limits)[turn]
                given_up = self._given_up(case.variant.engine)
                if given_up and not case.times:
                    case.left_out = case.left_out or given_up
                if few == 0 or case.left_out or given_up:
                    continue
                try:
                    if self._build(case.variant, case.shape):
                        read = self._read()
                    case.times += self.process(case.variant.engine).ask(
                        "time", case.variant.name, case.tokens, few, self.plan.seconds
                    )
                except PeerRefused as refusal:
                    case.left_out, case.times = str(refusal), []
                except PeerDied as death:
                    case.left_out, case.times = self._bury(case.variant, death), []
                after = self._read()
                case.reads += [read, after]
                read = after

    def _read(self) -> float:
        return self.process("lk").ask("machine", self.plan.cache_bytes, self.plan.read_seconds)["read"]


def available_bytes() -> float:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def facts(run: Run) -> dict:
    """The machine and the method, as stored beside the rows."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    brand = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "")
    return {
        "cpu": brand,
        "threads": run.plan.threads,
        "cache_bytes": run.plan.cache_bytes,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "dot_gflop_per_s": run.dot,
        "engines": run.about,
        "errors": run.errors,
        "unfit": run.unfit,
        "load_average": os.getloadavg()[0],
    }
