"""The native kernels as torch sees them: tensors in, addresses out.

One engine per process, made when the first layer asks for it and never in a launcher. Everything that the extension
takes on trust (device, type, shape, strides) is checked here; no other module passes an address. A tensor that cannot be
addressed row by row is copied first, one part of one expert at a time.

A new activation is a field of ``Activation`` that the extension knows; a new tensor type is an entry in a table below.
"""

import logging
import threading
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from sglang.srt.lk import boot, cpus
from sglang.srt.lk.config import Config
from sglang.srt.lk.formats import Packing
from sglang.srt.lk.install_check import ABI

logger = logging.getLogger(__name__)

PARTS = ("gate", "up", "down")
FLOATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
IDS = {torch.int32: "i32", torch.int64: "i64"}
# How long a worker waits awake. Torch's threads want the same cores between two layers: with 200 µs each layer of a decode
# step lost 240 µs to waiting workers, with 50 µs 60 to 80 (2 cores, 256 x 128 experts); without, waking up costs as much.
SPIN_US = 50
# Beside a GPU they have cores of their own; long enough for what the GPU does between two layers or steps.
GPU_SPIN_US = 300
UNBOUND = (
    "the system refused to bind {refused} of {threads} threads to their CPUs, so they run wherever it puts them and decode is "
    "slower; let the process use these CPUs (taskset, the container's cpuset), or set LK_THREAD_BINDING=NUMA_NODE"
)
UNPLACED = (
    "the system does not let memory be taken from a chosen NUMA node ({reason}), so each node's workers touch theirs first, "
    "which is as good until a node is full; in a container: --cap-add SYS_NICE"
)

_engine: Any = None
_engine_lock = threading.Lock()


class KernelError(RuntimeError):
    """The extension is missing, of another build, was handed something it cannot address, or gets no CPUs or threads."""


@dataclass(frozen=True)
class Activation:
    """``f(gate) * (up + up_bias)`` with ``f(g) = g * sigmoid(alpha * g)`` for silu.

    ``limit`` bounds the gate from above and ``up`` on both sides (0: no bound), before ``f`` or ``limit_after`` it.
    """

    name: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    limit_after: bool = False
    up_bias: float = 0.0


@cache
def extension() -> ModuleType:
    """The native module, refused when it was built for another version of this package."""
    try:
        import sgl_kernel_ext
    except ImportError as error:
        raise KernelError(f"Hybrid MoE: the extension sgl_kernel_ext does not load ({error}); reinstall sglang-lk") from error
    if sgl_kernel_ext.ABI != ABI:
        raise KernelError(
            f"Hybrid MoE: sgl_kernel_ext has ABI {sgl_kernel_ext.ABI} and this package needs {ABI}; reinstall sglang-lk"
        )
    return sgl_kernel_ext


def engine(
    *, config: Config | None = None, rank: int = 0, ranks: int = 1, gpu: bool = False, batch_invariant: bool = False
) -> Any:
    """This process's engine, on its share of the host's CPUs; the arguments count only the first time. ``config``: another than
    the process's own. Beside a GPU its workers stay awake for as long as the GPU is likely to work on the rest of a layer or
    step. ``batch_invariant``: a row's bits never depend on the other rows, also on ISAs with matrix multipliers."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = _made(config or boot.current(), rank=rank, ranks=ranks, gpu=gpu, batch_invariant=batch_invariant)
            if _engine.unbound:
                logger.warning("Hybrid MoE: %s", UNBOUND.format(refused=_engine.unbound, threads=_engine.threads))
            if _engine.unplaced:
                logger.warning("Hybrid MoE: %s", UNPLACED.format(reason=_engine.unplaced))
        return _engine


def _made(config: Config, *, rank: int, ranks: int, gpu: bool, batch_invariant: bool) -> Any:
    try:
        share = cpus.usable(config, rank=rank, ranks=ranks, affinity=boot.affinity(), gpu=gpu)
    except ValueError as error:
        raise KernelError(f"Hybrid MoE: {error}") from error
    for warning in share.warnings:
        logger.warning("Hybrid MoE: %s", warning)
    native = extension()
    try:
        return native.Engine(
            cpus=share.cpus,
            isa=config.isa or "",
            bind="core" if config.thread_binding == "CPU_CORE" else "node",
            spin_us=0 if config.power_saving else GPU_SPIN_US if gpu else SPIN_US,
            huge=config.numa_huge,
            batch_invariant=batch_invariant,
            **share.placement(config),
        )
    except RuntimeError as error:
        raise KernelError(f"Hybrid MoE: {error} (LK_THREADS sets the number of threads)") from error


class Experts:
    """The packed experts of one layer: filled part by part, then multiplied."""

    def __init__(
        self, engine: Any, *, packing: Packing, experts: int, hidden: int, width: int, activation: Activation, bias: bool
    ):
        self.native = extension().Experts(
            engine=engine,
            **asdict(packing),
            experts=experts,
            hidden=hidden,
            width=width,
            activation=activation.name,
            alpha=activation.alpha,
            limit=activation.limit,
            limit_after=activation.limit_after,
            up_bias=activation.up_bias,
            bias=bias,
        )
        self.hidden = hidden
        self.width = width
        self.bytes = self.native.bytes

    def take(self) -> None:
        """Touch the layer's memory with all threads, each on its NUMA node; before, only addresses are reserved."""
        self.native.take()

    def pack_codes(self, expert: int, part: str, rows: torch.Tensor) -> int:
        """Pack one part, a row per output; the number of codes that are no finite value. int32 words of eight codes may
        lie anywhere: their distance within a row is given, too."""
        if rows.dtype is torch.int32:
            rows = _words(rows)
            return self.native.pack_codes(expert, part, rows.data_ptr(), _row_bytes(rows), word_bytes=rows.stride(1) * 4)
        rows = _rows(rows)
        return self.native.pack_codes(expert, part, rows.data_ptr(), _row_bytes(rows))

    def pack_scales(self, expert: int, part: str, rows: torch.Tensor) -> int:
        """Pack one part's group scales; the number of scales that are none."""
        rows = _rows(rows)
        return self.native.pack_scales(expert, part, rows.data_ptr(), _row_bytes(rows))

    def pack_zeros(self, expert: int, part: str, rows: torch.Tensor) -> int:
        """Pack one part's zero points, uint8 ``[rows, groups]``; the number of those that are not from 0 to 16."""
        rows = _rows(rows)
        return self.native.pack_zeros(expert, part, rows.data_ptr(), _row_bytes(rows))

    def set_column_scales(self, expert: int, part: str, scales: torch.Tensor) -> None:
        """A float32 factor for each output."""
        scales = _host(scales).contiguous()
        self.native.set_column_scales(expert, part, scales.data_ptr())

    def set_global_scale(self, expert: int, part: str, multiplier: float) -> None:
        self.native.set_global_scale(expert, part, multiplier)

    def set_bias(self, expert: int, part: str, bias: torch.Tensor) -> None:
        bias = _host(bias).to(torch.float32).contiguous()
        self.native.set_bias(expert, part, bias.data_ptr())

    def repeat_first(self) -> None:
        """Every other expert becomes a copy of the first, in memory of its own."""
        self.native.repeat_first()

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, scale: float = 1.0, weight_on_input: bool = False
    ) -> torch.Tensor:
        """``scale`` times the routed sum, in the type of ``x``; ids outside the layer's experts contribute nothing."""
        self._check(x, ids, weights)
        out = torch.empty((x.shape[0], self.hidden), dtype=x.dtype)
        if x.shape[0] == 0 or ids.shape[1] == 0:
            return out.zero_()
        x, ids, weights = _rows(x), _rows(ids), _rows(weights.to(torch.float32))
        self.native.forward(
            x_ptr=x.data_ptr(),
            x_row_bytes=_row_bytes(x),
            x_dtype=FLOATS[x.dtype],
            tokens=x.shape[0],
            ids_ptr=ids.data_ptr(),
            ids_row_bytes=_row_bytes(ids),
            ids_dtype=IDS[ids.dtype],
            w_ptr=weights.data_ptr(),
            w_row_bytes=_row_bytes(weights),
            top_k=ids.shape[1],
            out_ptr=out.data_ptr(),
            out_row_bytes=_row_bytes(out),
            out_dtype=FLOATS[out.dtype],
            scale=scale,
            weight_on_input=weight_on_input,
        )
        return out

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        problems = []
        if x.dtype not in FLOATS or x.dim() != 2 or x.shape[-1] != self.hidden:
            problems.append(f"hidden states must be [tokens, {self.hidden}] of a float type, not {_said(x)}")
        if ids.dtype not in IDS or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
            problems.append(f"expert ids must be int32 or int64 [tokens, top_k], not {_said(ids)}")
        if not weights.dtype.is_floating_point or weights.shape != ids.shape:
            problems.append(f"routing weights must be floats of the ids' shape, not {_said(weights)}")
        problems += [f"{_said(t)} must be in host memory" for t in (x, ids, weights) if t.device.type != "cpu"]
        if problems:
            raise KernelError("Hybrid MoE: " + "; ".join(problems))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The matrix in host memory, its columns next to each other; rows may be any distance apart."""
    tensor = _host(tensor)
    if tensor.dim() != 2:
        raise KernelError(f"Hybrid MoE: a matrix is needed, not {_said(tensor)}")
    regular = tensor.shape[1] <= 1 or tensor.stride(1) == 1
    return tensor if regular and tensor.stride(0) >= 0 else tensor.contiguous()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The matrix of words in host memory, rows and words any distance apart."""
    tensor = _host(tensor)
    if tensor.dim() != 2:
        raise KernelError(f"Hybrid MoE: a matrix is needed, not {_said(tensor)}")
    return tensor


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.device.type == "cpu" else tensor.detach().cpu()


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
