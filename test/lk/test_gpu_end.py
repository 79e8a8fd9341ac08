"""The GPU's end of the hand-over as far as it can be seen without a GPU: sizes, layers and the end of a server."""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang.srt.lk import handover  # noqa: E402


class Native:
    """What ``Handover`` asks of the extension."""

    control_bytes = 256

    def __init__(self, failures=()):
        self.added, self.failures, self.aborted = [], list(failures), False

    def add(self, **layer):
        self.added.append(layer)
        return len(self.added) - 1

    def capacity(self, number):
        return 10_000

    def failure(self, ms):
        return self.failures.pop(0)

    def abort(self):
        self.aborted = True


@pytest.fixture
def hand():
    made = handover.Handover.__new__(handover.Handover)
    made.native, made.threads, made._layers = Native(), 8, {}
    return made


EXPERTS = SimpleNamespace(hidden=2048, width=768, native="experts")


def test_a_layer_is_known_by_everything_that_changes_its_result(hand):
    ways = [(torch.bfloat16, 8, 1.0, False), (torch.float16, 8, 1.0, False), (torch.bfloat16, 4, 1.0, False)]
    ways += [(torch.bfloat16, 8, 2.5, False), (torch.bfloat16, 8, 1.0, True)]
    numbers = [hand._layer(EXPERTS, "model.layers.0", *way).number for way in ways * 2]
    assert numbers == [0, 1, 2, 3, 4] * 2
    assert [(layer["dtype"], layer["scale"]) for layer in hand.native.added][:4] == [("bf16", 1.0), ("f16", 1.0), ("bf16", 1.0), ("bf16", 2.5)]


def test_a_draft_layer_of_the_same_name_keeps_its_own_experts(hand):
    way = ("model.layers.0", torch.bfloat16, 8, 1.0, False)
    draft = SimpleNamespace(hidden=2048, width=768, native="the draft's")
    assert [hand._layer(experts, *way).number for experts in (EXPERTS, draft, EXPERTS)] == [0, 1, 0]
    assert [layer["experts"] for layer in hand.native.added] == ["experts", "the draft's"]


def test_a_request_is_never_larger_than_one_pass_of_the_engine_and_a_slow_one_is_given_time(hand):
    layer = hand._layer(EXPERTS, "model.layers.0", torch.bfloat16, 8, 1.0, False)
    assert layer.capacity == handover.MOST_ROWS
    assert layer.ns_per_row == int(6 * 8 * 2048 * 768 / 0.5e9 / 8 * 1e9)  # 19 ms, for what takes a good engine 10 µs


def test_the_kernel_remembers_as_many_rows_as_a_request_may_have():
    source = Path(handover.__file__).with_suffix(".cu").read_text()
    assert re.search(r"kMostRows = (\d+);", source)[1] == str(handover.MOST_ROWS)


def test_the_parts_of_the_buffers_lie_apart_on_cache_lines():
    sizes = handover.Sizes(rows=3, hidden=40, top_k=5)
    made = handover.Buffers(sizes, control_bytes=256, pinned=False)
    spans = sorted((made.address[name], size) for name, size in zip(("control", "x", "ids", "weights", "out"), (256, 480, 60, 60, 480)))
    assert all(begin % 64 == made.memory.data_ptr() % 64 for begin, _ in spans)
    assert all(begin + size <= after for (begin, size), (after, _) in zip(spans, spans[1:]))
    assert spans[-1][0] + spans[-1][1] <= made.memory.data_ptr() + made.bytes and not made.memory.any()


def test_pieces_of_a_batch_know_where_in_it_they_begin(hand, monkeypatch):
    """So that what says how many rows of the batch are real says it to each of them."""
    made, real = [], torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(hand.native, "capacity", lambda number: 4)
    monkeypatch.setattr(hand, "_hand_over", lambda layer, x, routes, out, *, stream: made.append(routes), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    hand._captured = False
    x, ids, weights = torch.zeros(10, 2048), torch.zeros(10, 2, dtype=torch.int64), torch.zeros(10, 2)
    hand.forward(EXPERTS, x, ids, weights, name="model.layers.0", real=real)
    assert [(routes.first, routes.rows, routes.real) for routes in made] == [(first, min(4, 10 - first), real.data_ptr()) for first in (0, 4, 8)]
    assert [routes.ids - ids.data_ptr() for routes in made] == [0, 4 * 16, 8 * 16]
    made.clear()
    hand.forward(EXPERTS, x, ids, weights, name="model.layers.0")
    assert [routes.real for routes in made] == [0, 0, 0]


def test_a_second_model_is_given_the_larger_of_both_sizes():
    joined = handover.Sizes(rows=256, hidden=2048, top_k=8).join(handover.Sizes(rows=64, hidden=7168, top_k=6))
    assert (joined.rows, joined.hidden, joined.top_k) == (256, 7168, 8)


@pytest.mark.parametrize("bind, nodes, places", [
    (True, (4, 7), [0]), (False, (4, 7), [0]), (True, (0, 0), [0]), (False, (0, 0), [0, 1]), (False, (4, 4, 7), [0, 1]),
])  # fmt: skip
def test_the_thread_that_answers_is_bound_as_the_first_worker_that_it_is(bind, nodes, places):
    """To its CPU, or to those of its NUMA node: never to those of a node whose workers are others."""
    pytest.importorskip("sgl_kernel_ext", reason="the extension is not built")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one CPU: there is nowhere else to be")
    cpus = [allowed[0], allowed[1], allowed[-1]][: len(nodes)]
    expected = {cpus[i] for i in places}
    native = handover.answerer(SimpleNamespace(cpus=cpus, nodes=list(nodes)), spin_us=0, bind=bind)
    try:
        until = time.monotonic() + 5
        while (found := masks("lk-handover")) != [expected] and time.monotonic() < until:  # it has to name and bind itself first
            time.sleep(0.01)
    finally:
        native.close()
    assert found == [expected]


def masks(name: str) -> list[set[int]]:
    """Where this process's threads of a name may run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (task / "comm").read_text().strip() == name:
                found.append(os.sched_getaffinity(int(task.name)))
    return found


def test_the_watch_reports_a_failure_once():
    said = []
    handover.watch(Native(["", "", "model.layers.3: gone"]), end=said.append).join(10)
    assert said == ["model.layers.3: gone"]


def test_the_end_of_a_server_names_the_layer_tells_the_launcher_and_only_then_lets_the_gpu_go(monkeypatch, caplog):
    native, order = Native(), []
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4242))
    monkeypatch.setattr(os, "kill", lambda pid, number: order.append((pid, number, native.aborted)))
    monkeypatch.setattr(os, "_exit", lambda status: order.append((status, native.aborted)))
    handover.end_server(native)("model.layers.3: gone")
    assert order == [(4242, signal.SIGQUIT, False), (1, True)]
    assert "model.layers.3: gone" in caplog.text
