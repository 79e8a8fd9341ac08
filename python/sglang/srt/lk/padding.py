"""How many rows of a captured batch are real, so that no expert computes the others.

A decode graph is captured for a few batch sizes, and a batch in between replays the next larger one. Upstream fills it up
with rows that it routes like any other. So each graph reads a number in device memory, written before every replay: rows
from there on are padding to the hand-over. All runners of decode graphs are told so: of target and draft models, of steps
that verify drafts, with graphs in one piece or in several.

Eager batches are not padded; nothing here knows them. A graph of rows of several lengths (DSpark's compact verification,
off by default) is replayed with as many as it was captured for, and so all of them are computed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sglang.srt.lk.cpu_formats import expect

if TYPE_CHECKING:
    import torch

_captured: "tuple[torch.Tensor, int] | None" = None  # for the graph being captured now: where the number is, and its rows


def real_rows(rows: int) -> "torch.Tensor | None":
    """Where a layer with ``rows`` rows finds at replay how many of them are real: int32 [1] on its GPU. None where all are,
    or where the layer has not the rows of the batch."""
    return _captured[0] if _captured is not None and _captured[1] == rows else None


def tell_graphs(name: str) -> Callable[[ModuleType], None]:
    """Around ``capture_one`` and ``replay`` of the graph backend ``name``. Backends are the one place that every runner of
    decode graphs goes through; their loops over sizes and their batches differ. An edit would be one in each backend."""
    return lambda module: _tell(getattr(module, name))


def tell_first_step(module: ModuleType) -> None:
    """After ``prepare`` of the runner for all steps of a multi-layer draft: where one graph holds them all, it belongs to the
    first step's runner, and upstream tells that one nothing of the batch."""
    runner = module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    prepare = expect(runner, "prepare", ["self", "forward_batch", "staged"])

    @functools.wraps(prepare)
    def telling_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        for step in self.runners:
            if step is not None:
                step.raw_bs = self.raw_bs

    runner.prepare = telling_prepare


def _tell(backend: type) -> None:
    capture_one = expect(backend, "capture_one", ["self", "shape_key", "forward_fn", "capture_inputs", "post_warmup_hook"])
    replay = expect(backend, "replay", ["self", "shape_key", "static_forward_batch", "kwargs"])

    @functools.wraps(capture_one)
    def telling_capture_one(self: Any, shape_key: Any, *args: Any, **kwargs: Any) -> None:
        with _capturing(self, _rows(self._cuda_graph_runner, shape_key)):
            return capture_one(self, shape_key, *args, **kwargs)

    @functools.wraps(replay)
    def telling_replay(self: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        real = self.__dict__.get("_lk_real_rows")
        if real is not None:
            real.fill_(_real(self._cuda_graph_runner, shape_key))  # in stream order, like the replay itself
        return replay(self, shape_key, *args, **kwargs)

    backend.capture_one, backend.replay = telling_capture_one, telling_replay


@contextlib.contextmanager
def _capturing(backend: Any, rows: int | None) -> Iterator[None]:
    """Layers of this capture find the number of ``backend``; those of a prompt's graph (``rows`` None) find none."""
    global _captured
    if rows is None:
        yield
        return
    import torch

    if "_lk_real_rows" not in backend.__dict__:  # before the capture: its memory must not be a graph's
        backend._lk_real_rows = torch.zeros(1, dtype=torch.int32, device=backend._cuda_graph_runner.model_runner.device)
    before, _captured = _captured, (backend._lk_real_rows.fill_(rows), rows)
    try:
        yield
    finally:
        _captured = before


def _rows(runner: Any, shape_key: Any) -> int | None:
    """Rows of a graph: requests times the rows of each, unless it was captured for a number of rows."""
    width = getattr(runner, "captured_req_width", None)
    return width and shape_key.size * (1 if getattr(runner, "ragged_verify_mode", False) else width)


def _real(runner: Any, shape_key: Any) -> int:
    """Rows of the batch that is about to be replayed. All of them where the runner does not say."""
    rows = getattr(runner, "raw_num_token", None)  # of the target model's runners
    if rows is None and getattr(runner, "raw_bs", None) is not None:
        rows = runner.raw_bs * runner.captured_req_width
    return _rows(runner, shape_key) if rows is None else rows
