"""Graphs are told how many of their rows are real, whoever captures and replays them; everything else is left as it was."""

import importlib
import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang.srt.lk import padding  # noqa: E402
from sglang.srt.lk.cpu_formats import PatchError  # noqa: E402


class Backend:
    """As upstream's are: two warm-ups and a capture, each a forward; a replay looks up what was captured."""

    def __init__(self, runner, layer_rows=None):
        self._cuda_graph_runner = runner
        self.layer_rows = layer_rows
        self.graphs, self.seen = {}, []

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        for _ in range(3):
            self.graphs[shape_key.size] = forward_fn()

    def replay(self, shape_key, static_forward_batch, **kwargs):
        real = self.graphs[shape_key.size]
        self.seen.append(None if real is None else real.item())
        return "output"


@pytest.fixture(autouse=True)
def _told(monkeypatch):
    class Told(Backend):
        capture_one, replay = Backend.capture_one, Backend.replay

    padding.tell_graphs("Told")(SimpleNamespace(Told=Told))
    monkeypatch.setattr(f"{__name__}.Backend", Told)


def runner(**more):
    return SimpleNamespace(model_runner=SimpleNamespace(device="cpu"), **{"captured_req_width": 1, **more})


def key(size):
    return SimpleNamespace(size=size)


def capture(backend, sizes, rows_of=lambda size: size):
    for size in sizes:
        backend.capture_one(key(size), lambda: padding.real_rows(rows_of(size)))


@pytest.mark.parametrize("width", [1, 4])
def test_every_replay_knows_its_own_rows(width):
    backend = Backend(runner(captured_req_width=width))
    capture(backend, [8, 4], rows_of=lambda size: size * width)
    for size, raw in ((8, 5), (4, 4), (8, 8), (4, 1)):
        backend._cuda_graph_runner.raw_bs = raw
        assert backend.replay(key(size), None) == "output"
    assert backend.seen == [5 * width, 4 * width, 8 * width, width]


def test_the_target_models_runner_counts_rows_itself():
    backend = Backend(runner(captured_req_width=4, raw_bs=2, raw_num_token=7))
    capture(backend, [4], rows_of=lambda size: 16)
    backend.replay(key(4), None)
    assert backend.seen == [7]


def test_a_graph_that_was_captured_for_a_number_of_rows():
    backend = Backend(runner(captured_req_width=4, ragged_verify_mode=True, raw_num_token=9))
    capture(backend, [12])
    backend.replay(key(12), None)
    assert backend.seen == [9]


def test_all_rows_are_real_where_the_runner_does_not_say():
    backend = Backend(runner(captured_req_width=2))
    capture(backend, [4], rows_of=lambda size: 8)
    backend.replay(key(4), None)
    assert backend.seen == [8]


def test_each_runner_has_a_number_of_its_own():
    target, draft = Backend(runner(raw_bs=3)), Backend(runner(raw_bs=1))
    for backend in (target, draft):
        capture(backend, [4])
    numbers = [backend.graphs[4] for backend in (target, draft)]
    for backend in (target, draft):
        backend.replay(key(4), None)
    assert numbers[0] is not numbers[1] and [number.item() for number in numbers] == [3, 1]
    assert all(number.dtype is torch.int32 and number.shape == (1,) for number in numbers)


def test_a_layer_whose_rows_are_not_the_batchs_is_told_nothing():
    backend = Backend(runner(raw_bs=3))
    capture(backend, [4], rows_of=lambda size: size // 2)
    backend.replay(key(4), None)
    assert backend.seen == [None]


def test_a_prompts_graphs_and_eager_batches_are_told_nothing():
    prompts = Backend(SimpleNamespace(model_runner=SimpleNamespace(device="cpu"), raw_bs=1))
    capture(prompts, [64])
    prompts.replay(key(64), None)
    assert prompts.seen == [None] and padding.real_rows(64) is None


def test_a_capture_that_fails_leaves_nothing_behind():
    def fails():
        assert padding.real_rows(4) is not None
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        Backend(runner()).capture_one(key(4), fails)
    assert padding.real_rows(4) is None


def test_a_changed_upstream_fails_by_name():
    class Changed:
        def capture_one(self, key, forward): ...

    with pytest.raises(PatchError) as error:
        padding.tell_graphs("Changed")(SimpleNamespace(Changed=Changed))
    assert "Changed.capture_one" in str(error.value)


RUNNERS = ["model_executor.runner.decode_cuda_graph_runner"] + [
    f"speculative.{name}_cuda_graph_runner"
    for name in ("eagle_draft", "eagle_draft_extend", "multi_layer_eagle_draft_extend", "frozen_kv_mtp")
]


@pytest.mark.upstream
@pytest.mark.parametrize("name", RUNNERS)
def test_upstreams_runners_say_what_is_asked_of_them(name):
    source = inspect.getsource(importlib.import_module(f"sglang.srt.{name}"))
    asked = ["self.raw_bs = ", "captured_req_width", "self.backend.replay("]
    if "decode_cuda_graph" in name:
        asked += ["self.raw_num_token = ", "self.ragged_verify_mode = "]
    assert [words for words in asked if words not in source] == []
