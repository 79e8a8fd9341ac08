"""kt-kernel's extension, driven as its own wrappers drive it, without torch.

Its wheel holds one extension per instruction set; the best that the processor runs is loaded, as kt-kernel itself does.
Two things differ from its wrappers: the queue thread in front of the workers, which waits awake for its whole life, is
not started; and the calling thread, which waits awake as well, sleeps while the workers compute if there are as many
workers as cores (``park.c``). Both make kt-kernel faster, never slower.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import formats, install, llama
from .cases import TOKENS, Shape, Variant
from .engine import Bound, Clock, Engine, Layer, alike, stacked
from .formats import PARTS, Expert

MOST_TOKENS = max(TOKENS)
FEW_CORES = 8  # with more, one core of them for the caller costs less than parking it
QUANT = {  # bits and group size that the wrappers set, 0 = as the matrix says
    "fp8_block": (8, 128), "fp8_channel": (8, -1), "mxfp8": (8, 32), "mxfp4": (4, 32), "nvfp4": (4, 16),
    "int4_g32": (4, 32), "int4_gptq": (4, 0),
}  # fmt: skip


class Native(Engine):
    def __init__(self, threads: int, cache: Path) -> None:
        flags = install.cpu_flags()
        variant = next(name for name, needs in install.KT_VARIANTS.items() if needs <= flags)
        self.ext = self._load(install.kt_folder(cache) / "kt_kernel", variant)
        self.parked = threads <= FEW_CORES
        workers = threads if self.parked else threads - 1
        self.ext.CPUInfer(1)  # for what its constructor does once: the tables of its ggml; it ends here
        self.pool = self.ext.WorkerPool(workers)
        self.park = Park(cache / "park.so") if self.parked else None
        self.ggml = llama.Quantiser(cache)
        self.about = {
            "library": "kt-kernel", "version": install.KT_VERSION, "extension": variant, "workers": workers,
            "caller_parked": self.parked, "caller_priority": self.park.priority if self.park else 0,
        }  # fmt: skip

    @staticmethod
    def _load(folder: Path, variant: str):
        (file,) = folder.glob(f"_kt_kernel_ext_{variant}.*.so")
        spec = importlib.util.spec_from_file_location("kt_kernel_ext", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def offers(self, variant: Variant) -> str:
        return "" if hasattr(self.ext.moe, variant.kind) else f"this extension has no {variant.kind}"

    def quantiser(self):
        return self.ggml

    def layer(self, variant: Variant, shape: Shape, experts: list[Expert]) -> Layer:
        mask = np.zeros(shape.experts, np.uint8)
        config = self.ext.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.width, mask.ctypes.data)
        config.layer_idx, config.pool, config.max_len = 0, self.pool, MOST_TOKENS
        if variant.kind == "MOE":
            kept = self._gguf(config, variant, experts)
        elif variant.stored:  # quantised by the peer from bf16
            kept = self._whole(config, experts)
        else:
            kept = self._pointers(config, variant, experts)
        moe = self.waiting(lambda: getattr(self.ext.moe, variant.kind)(config))
        self.waiting(moe.load_weights)
        return KtLayer(moe, [mask, *(kept if variant.kind == "MOE" else ())])  # MOE computes from the bytes it was given

    def _whole(self, config, experts: list[Expert]) -> list[np.ndarray]:
        stacks = [stacked(experts, part) for part in PARTS]
        config.gate_proj, config.up_proj, config.down_proj = (stack.ctypes.data for stack in stacks)
        return stacks

    def _gguf(self, config, variant: Variant, experts: list[Expert]) -> list[np.ndarray]:
        config.m_block, config.group_min_len, config.group_max_len = 32, 10, MOST_TOKENS
        config.gate_type = config.up_type = config.down_type = formats.GGML[variant.format]
        config.hidden_type = llama.BF16
        return self._whole(config, experts)

    def _pointers(self, config, variant: Variant, experts: list[Expert]) -> list[np.ndarray]:
        if variant.format in QUANT:
            bits, group = QUANT[variant.format]
            config.quant_config.bits, config.quant_config.zero_point = bits, False
            if group < 0:
                config.quant_config.per_channel = True
            else:
                config.quant_config.group_size = group or experts[0]["gate"].group
        kept: list[np.ndarray] = []
        scales_of = {id(expert): self._scales(variant.format, expert, kept) for expert in experts}
        for part in PARTS:
            setattr(config, f"{part}_projs", [[expert[part].codes.ctypes.data for expert in experts]])
            setattr(config, f"{part}_scales", [[scales_of[id(expert)][part] for expert in experts]])
        return kept

    @staticmethod
    def _scales(fmt: str, expert: Expert, kept: list[np.ndarray]) -> dict[str, int]:
        """Addresses of the scales in kt-kernel's own width; the arrays go to ``kept``."""
        addresses = {}
        for part, matrix in expert.items():
            scales = matrix.scales
            if fmt == "mxfp4":
                scales = formats.to_bf16(2.0 ** (scales.astype(np.float32) - 127))
            elif fmt == "nvfp4":
                scales = formats.to_bf16(formats.E4M3[scales] * matrix.global_scale)
            if scales is not None:
                kept.append(scales)
            addresses[part] = 0 if scales is None else scales.ctypes.data
        return addresses

    def waiting(self, call: Callable[[], Any]) -> Any:
        """A long call: the caller looks once in a while."""
        if self.park:
            self.park.begin(10_000_000, 1_000_000, 1_000_000)
        try:
            return call()
        finally:
            if self.park:
                self.park.end()

    def clock(self, guess: float | None) -> Clock:
        return ParkedClock(self.park, guess) if self.park else Clock()


class Park:
    """``park.c`` for the calling thread."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        # Beside the first worker, which is idle when the caller adds up what the workers did, with the others.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        library.park_begin.argtypes = [ctypes.c_int64] * 3
        self.priority = self._come_first()
        error = library.park_open()
        if error:
            raise OSError(error, "park_open: no timer for the calling thread")
        self.begin, self.end = library.park_begin, library.park_end

    @staticmethod
    def _come_first() -> int:
        """The caller gets a real-time priority above the workers', so that it runs when it wakes up; 0 where it may not."""
        own = os.sched_getparam(0).sched_priority
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(own + 1))
        except PermissionError:
            return 0
        return own + 1


class ParkedClock(Clock):
    """Guesses how long the next call lasts from those before, so that the caller sleeps for most of it.

    ``waking`` is what a call lasts after a sleep in which its work ended: such a call only says that the guess was too
    long. One that had long to go when the caller woke up lost time to its waiting. Neither is a measurement; a measured
    one lost at most one core's time from the end of the sleep on, some 3 % of the shortest calls and 1 % of others.
    """

    ENDED = 1.4  # times ``waking``: calls that end later after the sleep had not ended in it
    EARLY = 0.02, 1.9  # the caller wakes up so much of the guess, and so many ``waking``, before the expected end
    LATE = 0.08, 3.0  # of the call and ``waking``: it had long to go
    DRIFT = 1.01
    LONG = 0.2
    SLOWED = 1.3  # what waiting awake does to the rest of a call
    SURE = 0.05, 300e-6  # of a call, and seconds: at the beginning, one that ends so soon had ended in the sleep

    def __init__(self, park, guess: float | None = None) -> None:
        self.park, self.guess = park, guess or 0.02
        self.waking = 0.002 * self.guess if self.guess > self.LONG else 0.0  # too few calls to learn it, and too long to matter
        self.best = float("inf")  # no call lasts longer than the quickest one; it may drift
        self.missed, self.settled = 0, False

    def time(self, call: Callable[[], None]) -> float | None:
        sleep = max(self.guess - max(self.EARLY[0] * self.guess, self.EARLY[1] * self.waking), 0.0)
        look, nap = max(40e-6, 0.02 * self.guess), max(30e-6, 0.01 * self.guess)
        arguments = int(sleep * 1e9), int(look * 1e9), int(nap * 1e9)
        begin, end, now = self.park.begin, self.park.end, time.perf_counter
        start = now()
        begin(*arguments)
        call()
        sleeps = end()
        lasted = now() - start
        # What ended in a nap ended somewhere between its beginning and the caller's waking up.
        return self.learn(sleep, lasted - (nap + self.waking) / 2 if sleeps > 1 and self.waking else lasted)

    def learn(self, sleep: float, lasted: float) -> float | None:
        after, self.best = lasted - sleep, min(self.best * self.DRIFT, lasted)
        if not self.waking:
            if after < max(self.SURE[0] * lasted, self.SURE[1]):
                self.waking = after
            self.guess = self.best if self.waking else 1.15 * lasted
            return None
        measured = self._learn(sleep, lasted, after)
        self.guess = min(self.guess, self.best)
        return measured

    def _learn(self, sleep: float, lasted: float, after: float) -> float | None:
        if after < self.ENDED * self.waking:
            self.missed += 1
            self.waking = 0.7 * self.waking + 0.3 * after
            self.guess *= (0.97, 0.93, 0.8)[min(self.missed, 3) - 1]
            return None
        self.missed = 0
        if after < self.LATE[0] * lasted + self.LATE[1] * self.waking:
            self.settled, self.guess = True, lasted
            return lasted
        # One slow call among steady ones is as it is and teaches nothing.
        steady, self.settled = self.settled, False
        if not steady:
            self.guess = sleep + after / self.SLOWED
        return lasted if steady else None


class KtLayer(Layer):
    def __init__(self, moe, kept: list[np.ndarray]) -> None:
        self.moe, self.kept = moe, kept

    def bind(self, x: np.ndarray, routing: np.ndarray) -> Bound:
        return KtBound(self.moe, x, routing)


class KtBound(Bound):
    def __init__(self, moe, x: np.ndarray, routing: np.ndarray) -> None:
        self.moe, self.x, self.routing, self.result = moe, x, routing, np.empty_like(x)
        self.tokens, self.kept = np.array([len(x)], np.int32), []

    def at(self, ids: np.ndarray) -> Callable[[], None]:
        wide = ids.astype(np.int64)
        self.kept.append(wide)
        arguments = (
            self.tokens.ctypes.data, ids.shape[1], wide.ctypes.data, self.routing.ctypes.data, self.x.ctypes.data,
            self.result.ctypes.data, False,
        )  # fmt: skip
        forward = self.moe.forward
        return lambda: forward(*arguments)

    def poison(self) -> None:
        self.result[:] = 0x7FC1

    def out(self) -> np.ndarray:
        return formats.from_bf16(self.result)
