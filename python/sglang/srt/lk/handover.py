"""The hand-over of a layer's rows from the GPU to the CPU experts and back, in stream order.

A kernel puts a layer's rows into pinned memory, waits until a native thread has computed them, and copies the answer back:
one ordinary step of a stream, so a CUDA graph captures it (``handover.cu`` and ``moe/handover.h`` are the two ends). What
other streams have to do runs meanwhile. With ``LK_HF_MBOX=0`` two kernels only copy, and host functions of the driver
stand between them. Nothing here computes or chooses a role.

A GPU must never wait for ever: the native watch names a layer that gives no answer, and ``end_server`` ends the server
then; the kernel has a longer limit of its own for a process that is stopped as a whole.
"""

import atexit
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from sglang.srt.lk import driver, kernels

logger = logging.getLogger(__name__)

PATIENCE_MS = 4000  # for an answer of few rows, before the watch gives the engine up
GPU_LIMIT_NS = 30_000_000_000  # what the GPU waits when even the watch does not run
SLOWEST_FLOPS = 0.5e9  # of one thread; what the limits allow for large batches
MOST_ROWS = 4096  # of one request: the engine's own pass (and kMostRows); larger batches are handed over in pieces
BLOCKS, THREADS = 64, 512  # of a kernel at most; one block serves a decode step of one row
LINE = 64


class _Rows(ctypes.Structure):
    """``Rows`` of handover.cu."""

    _fields_ = [("data", ctypes.c_uint64), ("stride", ctypes.c_uint64), ("row_bytes", ctypes.c_int), ("words", ctypes.c_int)]


class _Routes(ctypes.Structure):
    """``Routes`` of handover.cu."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("ids", "ids_stride", "weights", "weights_stride", "real")] + [
        (name, ctypes.c_int) for name in ("rows", "top_k", "wide", "first")
    ]


class _Host(ctypes.Structure):
    """``Host`` of handover.cu; the names are those of ``Buffers.address``."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("control", "x", "ids", "weights", "out")]


@dataclass(frozen=True)
class Sizes:
    """What the pinned memory must hold at once: rows of ``hidden`` elements of ``width`` bytes with ``top_k`` routes."""

    rows: int
    hidden: int
    top_k: int
    width: int = 4  # float32 is the widest type that is handed over

    def join(self, other: "Sizes") -> "Sizes":
        return Sizes(*(max(a, b) for a, b in zip(self._tuple(), other._tuple())))

    def _tuple(self) -> tuple[int, ...]:
        return self.rows, self.hidden, self.top_k, self.width

    @property
    def row_bytes(self) -> int:
        return self.rows * self.hidden * self.width

    @property
    def routes(self) -> int:
        return self.rows * self.top_k


class Buffers:
    """One block of pinned memory with the control words, rows, ids, weights and answers of one request."""

    def __init__(self, sizes: Sizes, *, control_bytes: int, pinned: bool = True):
        parts = {"control": control_bytes, "x": sizes.row_bytes, "ids": 4 * sizes.routes, "weights": 4 * sizes.routes, "out": sizes.row_bytes}
        self.sizes = sizes
        self.bytes = sum(map(_lines, parts.values()))
        # zeros: an untouched page would be mapped in the first request
        self.memory = torch.zeros(self.bytes, dtype=torch.uint8, pin_memory=pinned)
        self.address: dict[str, int] = {}
        at = self.memory.data_ptr()
        for name, size in parts.items():
            self.address[name] = at
            at += _lines(size)


def answerer(engine: Any, *, spin_us: int, bind: bool) -> Any:
    """The native end of a hand-over to ``engine``. Its thread calls the engine and is thereby worker 0, so it has that worker's
    CPU to itself (``bind``) or, as other workers then, moves among those of its NUMA node."""
    cpus, nodes = engine.cpus, engine.nodes
    home = [cpu for cpu, node in zip(cpus, nodes) if node == nodes[0]]
    return kernels.extension().Handover(cpus=home, cpu=cpus[0] if bind else -1, spin_us=spin_us, patience_ms=PATIENCE_MS)


class Handover:
    """One per process and GPU. ``mailbox``: flags in pinned memory; otherwise host functions."""

    def __init__(self, *, sizes: Sizes, device: torch.device, mailbox: bool, engine: Any, spin_us: int, bind: bool = True):
        self.native = answerer(engine, spin_us=spin_us, bind=bind)
        self.threads = engine.threads
        self.device = device
        self.mailbox = mailbox
        self._state = torch.zeros(LINE, dtype=torch.uint8, device=device)  # first: it makes the context
        major, minor = torch.cuda.get_device_capability(device)
        module = driver.Module(Path(__file__).with_name("handover.cu"), architecture=f"sm_{major}{minor}")
        self._exchange, self._publish, self._collect = map(module.kernel, ("exchange", "publish", "collect"))
        # The blocks of an exchange wait for each other: one that found no room would never come, were there more of them.
        self.blocks = min(BLOCKS, torch.cuda.get_device_properties(device).multi_processor_count)
        self._submit, self._join = self.native.host_functions
        self._layers: dict[tuple[Any, ...], _Layer] = {}
        self._captured = False
        self.buffers: Buffers | None = None
        self.reserve(sizes)
        atexit.register(self.native.close)  # before torch gives the pinned memory back

    def reserve(self, sizes: Sizes) -> None:
        """Make room for larger requests, unless a graph refers to the memory there is: then they come in pieces."""
        if self.buffers is not None:
            sizes = sizes.join(self.buffers.sizes)
            if self._captured or sizes == self.buffers.sizes:
                return
        torch.cuda.synchronize(self.device)
        self.buffers = Buffers(sizes, control_bytes=self.native.control_bytes)
        address = self.buffers.address
        self.native.bind(
            **address, x_bytes=sizes.row_bytes, out_bytes=sizes.row_bytes, routes=sizes.routes, owner=self.buffers.memory
        )

    def forward(
        self,
        experts: kernels.Experts,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        name: str,
        scale: float = 1.0,
        weight_on_input: bool = False,
        real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``scale`` times the routed sums of ``x`` [tokens, hidden] on this GPU, in its type. Rows whose ids are all
        negative are padding and come back as zeros; so are, with ``real`` (int32 [1] on this GPU, read when the kernel
        runs, so that a replay can be told another number), the rows from there on."""
        x, ids, weights = _columns(x), _columns(ids), _columns(weights.to(torch.float32))
        out = torch.empty((x.shape[0], experts.hidden), dtype=x.dtype, device=x.device)
        layer = self._layer(experts, name, x.dtype, ids.shape[1], scale, weight_on_input)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        for first in range(0, x.shape[0], layer.capacity):
            rows = min(layer.capacity, x.shape[0] - first)
            x_, ids_, weights_, out_ = (tensor[first : first + rows] for tensor in (x, ids, weights, out))
            self._hand_over(layer, x_, _routes(ids_, weights_, real, first), out_, stream=stream)
        return out

    def check(self, experts: kernels.Experts, *, name: str, top_k: int, dtype: torch.dtype, **rest: Any) -> None:
        """Hand two rows over, one of them padding, and compare with a direct call: ``KernelError`` if they differ. ``rest``
        is the layer's own scale and place of the routing weight, as in ``forward``."""
        x = torch.randn((2, experts.hidden), generator=torch.Generator().manual_seed(0)).to(dtype)
        ids = torch.tensor([[k % experts.native.experts for k in range(top_k)], [-1] * top_k], dtype=torch.int32)
        weights = torch.full((2, top_k), 1 / top_k)
        expected = experts.forward(x, ids, weights, **rest)
        found = self.forward(experts, *(tensor.to(self.device) for tensor in (x, ids, weights)), name=name, **rest).cpu()
        if not torch.equal(found, expected):
            worst = (found.float() - expected.float()).abs().max().item()
            raise kernels.KernelError(f"Hybrid MoE: {name}: what came back from the CPU differs from a direct call by {worst}")

    def _hand_over(self, layer: "_Layer", x: torch.Tensor, routes: _Routes, out: torch.Tensor, *, stream: int) -> None:
        given, wanted = _rows(x), _rows(out)
        host = _Host(**self.buffers.address)
        launch = {"blocks": min(x.shape[0], self.blocks), "threads": THREADS, "stream": stream}
        if self.mailbox:
            state, number = ctypes.c_uint64(self._state.data_ptr()), ctypes.c_int(layer.number)
            limit = ctypes.c_uint64(GPU_LIMIT_NS + layer.ns_per_row * x.shape[0])
            self._exchange.launch([given, wanted, routes, host, state, limit, number], **launch)
        else:
            ticket = self.native.ticket(layer.number, x.shape[0])
            self._publish.launch([given, routes, host], **launch)
            driver.launch_host_function(self._submit, ticket, stream=stream)
            driver.launch_host_function(self._join, ticket, stream=stream)
            self._collect.launch([wanted, routes, host], **launch)

    def _layer(
        self, experts: kernels.Experts, name: str, dtype: torch.dtype, top_k: int, scale: float, weight_on_input: bool
    ) -> "_Layer":
        # Not the name: a draft model's layers may be called as the main model's are.
        key = (experts.native, dtype, top_k, scale, weight_on_input)
        found = self._layers.get(key)
        if found is None:
            flops = 6 * top_k * experts.hidden * experts.width
            ns_per_row = int(flops / SLOWEST_FLOPS / self.threads * 1e9)
            number = self.native.add(
                name=name, experts=experts.native, top_k=top_k, dtype=kernels.FLOATS[dtype], scale=scale,
                weight_on_input=weight_on_input, ns_per_row=ns_per_row,
            )
            capacity = min(self.native.capacity(number), MOST_ROWS)
            found = self._layers[key] = _Layer(number, ns_per_row, capacity)
        return found


@dataclass(frozen=True)
class _Layer:
    number: int  # by which requests name it
    ns_per_row: int
    capacity: int  # rows of one request


def watch(native: Any, *, end: Callable[[str], None]) -> threading.Thread:
    """Call ``end`` with what the native watch reports, once."""

    def wait() -> None:
        while not (failure := native.failure(ms=1000)):
            pass
        end(failure)

    thread = threading.Thread(target=wait, name="lk-failure", daemon=True)
    thread.start()
    return thread


def end_server(native: Any) -> Callable[[str], NoReturn]:
    """What ``watch`` calls in a server: one message, the launcher told to end the tree, the GPU let go, and out."""

    def end(failure: str) -> NoReturn:
        import multiprocessing

        logger.error("Hybrid MoE: %s. The server ends, because what the GPU would compute from here on is no result.", failure)
        parent = multiprocessing.parent_process()
        if parent is not None:
            os.kill(parent.pid, signal.SIGQUIT)  # as upstream's scheduler does: the launcher ends the whole tree
        native.abort()
        os._exit(1)

    return end


def _rows(data: torch.Tensor) -> _Rows:
    stride, row_bytes = (size * data.element_size() for size in (data.stride(0), data.shape[1]))
    words = not any(value % 16 for value in (data.data_ptr(), stride, row_bytes))
    return _Rows(data=data.data_ptr(), stride=stride, row_bytes=row_bytes, words=words)


def _routes(ids: torch.Tensor, weights: torch.Tensor, real: torch.Tensor | None, first: int) -> _Routes:
    return _Routes(
        ids=ids.data_ptr(), ids_stride=ids.stride(0) * ids.element_size(),
        weights=weights.data_ptr(), weights_stride=weights.stride(0) * weights.element_size(),
        real=0 if real is None else real.data_ptr(), rows=ids.shape[0], top_k=ids.shape[1], wide=ids.dtype is torch.int64,
        first=first,
    )


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    """The matrix with its columns next to each other; rows may be any distance apart."""
    return tensor if tensor.stride(1) == 1 and tensor.stride(0) >= 0 else tensor.contiguous()


def _lines(size: int) -> int:
    return (size + LINE - 1) // LINE * LINE
