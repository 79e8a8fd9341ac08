"""One layer's experts on the host while they arrive: what has come, what is missing, how fast it goes.

The bytes themselves lie in the extension's panels; here is the ledger over them. Nothing of it is a parameter or buffer,
so upstream never moves or post-processes it. Loaders may call from several threads.

A new kind of tensor is a method in ``LayerStore._put`` and an entry in its format's ``needs``.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import torch

from sglang.srt.lk.formats import (
    BIAS,
    CHANNEL,
    CODES,
    GLOBAL,
    ORDER,
    SCALES,
    UNUSED,
    ZEROS,
    ExpertFormat,
    FormatError,
    Geometry,
)
from sglang.srt.lk.formats.geometry import ROWS, Axis, Window, shape
from sglang.srt.lk.kernels import PARTS, Experts

logger = logging.getLogger(__name__)

GB = 1e9


class Clock:
    """Seconds in which at least one thread was inside ``running``."""

    def __init__(self) -> None:
        self._finished = 0.0
        self._inside = 0
        self._since = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._since = time.monotonic()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._finished += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._finished + (time.monotonic() - self._since if self._inside else 0.0)


class Progress:
    """What all layers of this process have packed, said at most every ``every`` seconds. Apart from the whole time it knows
    that of ``packing`` itself, and that of ``taking`` memory, in which the system clears pages."""

    def __init__(self, every: float = 5.0):
        self.every = every
        self.total = 0
        self.done = 0
        self.began: float | None = None
        self.packing = Clock()
        self.taking = Clock()
        self._said = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """With the first tensor, before its layer's memory is taken."""
        with self._lock:
            if self.began is None:
                self.began = self._said = time.monotonic()

    def expect(self, size: int) -> None:
        with self._lock:
            self.total += size

    def add(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            self.done += size
            if now - self._said < self.every:
                return
            self._said = now
            line = self._line(now)
        logger.info("Hybrid MoE: %s", line)

    def summary(self) -> str:
        with self._lock:
            return self._line(time.monotonic())

    def _line(self, now: float) -> str:
        seconds, packing = max(now - (self.began or now), 1e-9), max(self.packing.seconds, 1e-9)
        return (
            f"{self.done / GB:.2f} of {self.total / GB:.2f} GB of experts packed in {seconds:.1f} s, "
            f"{self.done / GB / seconds:.2f} GB/s (packing alone {packing:.1f} s, {self.done / GB / packing:.2f} GB/s; "
            f"the system gave their memory in {self.taking.seconds:.1f} s)"
        )


class LayerStore:
    """The ledger of one layer: every (expert, part, kind of tensor) that its format needs comes once."""

    def __init__(
        self, *, name: str, layer_id: int, format: ExpertFormat, experts: Experts, geometry: Geometry, bias: bool, progress: Progress
    ):
        self.name = name
        self.layer_id = layer_id
        self.format = format
        self.experts = experts
        self.geometry = geometry
        self.packing = format.packing(geometry)
        self.needs = format.needs + ((BIAS,) if bias else ())
        self.complete = False
        self._progress = progress
        self._here: set[tuple[int, str, str]] = set()
        self._lock = threading.Lock()
        self._taken = False
        self._taken_lock = threading.Lock()
        self._put = {
            CODES: self._codes,
            SCALES: self._scales,
            ZEROS: self._zeros,
            ORDER: self._order,
            CHANNEL: self._channel_scales,
            GLOBAL: self._global_scale,
            BIAS: self._bias,
        }
        progress.expect(geometry.experts * sum(self._bytes(part) for part in PARTS))

    def put(self, expert: int, part: str, what: str, tensor: torch.Tensor, window: Window) -> None:
        """Pack one tensor of one expert, cut to what the window touches; ``FormatError`` says what is wrong with it."""
        if what == UNUSED:
            return
        self._progress.begin()
        self._take()
        self._put[what](expert, part, tensor, window)
        self._note(expert, part, what)

    def _take(self) -> None:
        """The layer's memory, before its first byte is packed: all threads touch it, so that packing waits for nothing."""
        with self._taken_lock:
            if not self._taken:
                with self._progress.taking.running():
                    self.experts.take()
                self._taken = True

    def _codes(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        codes = self.format.codes(tensor, self.geometry)
        with self._progress.packing.running():
            bad = self.experts.pack_codes(expert, part, codes)
        _finite(bad, tensor, "weights")

    def _scales(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        scales = self.format.scales(tensor, window, self.packing)
        with self._progress.packing.running():
            bad = self.experts.pack_scales(expert, part, scales)
        if bad and scales.numel() != tensor.numel():  # spread: what is said is about the checkpoint's own
            bad = int((~torch.isfinite(tensor.to(torch.float32))).sum())
        _finite(bad, tensor, "scales")

    def _zeros(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        zeros = self.format.zeros(tensor, window, self.packing)
        with self._progress.packing.running():
            bad = self.experts.pack_zeros(expert, part, zeros)
        if bad:
            raise FormatError(f"{bad} of {zeros.numel()} zero points are not from 0 to 16")

    def _channel_scales(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        scales = self.format.channel_scales(tensor)
        _finite(int((~torch.isfinite(scales)).sum()), scales, "scales")
        self.experts.set_column_scales(expert, part, scales)

    def _global_scale(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        if tensor.numel() != 1:
            raise FormatError(f"the per-tensor scale has shape {list(tensor.shape)}; expected one number")
        self.experts.set_global_scale(expert, part, self.format.multiplier(float(tensor)))

    def _bias(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        _finite(int((~torch.isfinite(tensor)).sum()), tensor, "biases")
        self.experts.set_bias(expert, part, tensor)

    def _order(self, expert: int, part: str, tensor: torch.Tensor, window: Window) -> None:
        self.format.check_order(tensor)

    def axes(self, what: str) -> tuple[Axis, ...]:
        """Of one expert's tensor of this kind in the checkpoint."""
        if what == GLOBAL:
            return ()
        return (Axis(ROWS),) if what == BIAS else self.format.axes(what)

    def missing(self) -> list[tuple[int, str, str]]:
        """What the format needs and the checkpoint did not bring."""
        wanted = ((e, part, what) for e in range(self.geometry.experts) for part in PARTS for what in self.needs)
        return [item for item in wanted if item not in self._here]

    def fill_with_samples(self, seed: int) -> None:
        """Valid random experts, for ``--load-format dummy``; all experts of a layer share their values."""
        generator = torch.Generator().manual_seed(seed)
        for part in PARTS:
            window = self.geometry.window(part, alone=True)
            for what in self.needs:
                tensor = self.format.sample(what, shape(self.axes(what), window), generator)
                self.put(0, part, what, tensor, window)
        with self._progress.packing.running():
            self.experts.repeat_first()
        for expert in range(1, self.geometry.experts):
            for part in PARTS:
                for what in self.needs:
                    self._note(expert, part, what)

    def _note(self, expert: int, part: str, what: str) -> None:
        key = (expert, part, what)
        with self._lock:
            first = key not in self._here
            self._here.add(key)
        if first and what == CODES:
            self._progress.add(self._bytes(part))

    def _bytes(self, part: str) -> int:
        """Of one expert's part, packed: its share of the whole by its weights."""
        return self.experts.bytes // (len(PARTS) * self.geometry.experts)


def _finite(bad: int, tensor: torch.Tensor, what: str) -> None:
    if bad:
        raise FormatError(f"{bad} of {tensor.numel()} {what} are not valid numbers (NaN, infinite or of the wrong sign)")
