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

    def __init__(self, runner):
        self._cuda_graph_runner = runner
        self.graphs, self.seen, self.given = {}, [], []

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        self.given.append((capture_inputs, post_warmup_hook))
        for _ in range(3):
            self.graphs[shape_key.size] = forward_fn()

    def replay(self, shape_key, static_forward_batch, **kwargs):
        real = self.graphs[shape_key.size]
        self.seen.append(None if real is None else real.item())
        return "output", static_forward_batch, kwargs


@pytest.fixture(autouse=True)
def _told(monkeypatch):
    class Told(Backend):
        capture_one, replay = Backend.capture_one, Backend.replay

    padding.tell_graphs("Told")(SimpleNamespace(Told=Told))
    monkeypatch.setattr(f"{__name__}.Backend", Told)


def runner(**more):
    return SimpleNamespace(**{"model_runner": SimpleNamespace(device="cpu"), "captured_req_width": 1, **more})


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
        backend.replay(key(size), None)
    assert backend.seen == [5 * width, 4 * width, 8 * width, width]


def test_the_target_models_runner_counts_rows_itself():
    backend = Backend(runner(captured_req_width=4, raw_bs=2, raw_num_token=7))
    capture(backend, [4], rows_of=lambda size: 16)
    backend.replay(key(4), None)
    assert backend.seen == [7]


def test_a_graph_that_was_captured_for_a_number_of_rows():
    """Upstream fills such a batch up before it says how many there are."""
    backend = Backend(runner(captured_req_width=4, ragged_verify_mode=True, raw_num_token=12))
    capture(backend, [12])
    backend.replay(key(12), None)
    assert backend.seen == [12]


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


def test_whatever_else_upstream_hands_over_arrives():
    backend, hooks = Backend(runner()), []
    backend.capture_one(key(4), lambda: None, capture_inputs="inputs", post_warmup_hook=hooks.append)
    backend.capture_one(key(4), lambda: None, "inputs", hooks.append)
    assert backend.given == [("inputs", hooks.append)] * 2
    assert backend.replay(key(4), "batch", more=1) == ("output", "batch", {"more": 1})


def test_the_number_lies_on_the_runners_device():
    backend = Backend(runner(model_runner=SimpleNamespace(device="meta")))
    backend.capture_one(key(4), lambda: padding.real_rows(4))
    assert backend.graphs[4].device.type == "meta"


@pytest.mark.parametrize("name", ["capture_one", "replay"])
def test_a_changed_upstream_fails_by_name(name):
    changed = type("Changed", (), {**{each: vars(Backend)[each] for each in ("capture_one", "replay")}, name: lambda self, key: None})
    with pytest.raises(PatchError) as error:
        padding.tell_graphs("Changed")(SimpleNamespace(Changed=changed))
    assert f"Changed.{name}" in str(error.value)


def test_one_graph_of_all_steps_of_a_draft_knows_the_batch_that_was_prepared():
    """Upstream's two: one replays each step's runner, after telling it, the other only the first step's backend."""

    class Steps:
        def __init__(self):
            self.runners = [runner(captured_req_width=4), None, runner(captured_req_width=4)]
            self.backend = Backend(self.runners[0])

        def prepare(self, forward_batch, *, staged=False):
            self.raw_bs = forward_batch.batch_size

        def replay(self, step):
            return self.backend.replay(key(8), None)

    padding.tell_first_step(SimpleNamespace(MultiLayerEagleMultiStepDraftExtendCudaGraphRunner=Steps))
    steps = Steps()
    capture(steps.backend, [8], rows_of=lambda size: 32)
    for count in (5, 8, 1):
        steps.prepare(SimpleNamespace(batch_size=count), staged=False)
        steps.replay(0)
    assert steps.backend.seen == [20, 32, 4]


# Upstream's runners: what says how many requests or rows a batch has, and the replay that comes after it.
TOLD = {
    "model_executor.runner.decode": ("self.raw_num_token = ", "self.backend.replay(self._replay_graph_key"),
    "speculative.eagle_draft": ("self.raw_bs = ", "self._replay_graph(shape_key"),
    "speculative.eagle_draft_extend": ("self.raw_bs = ", "self._replay_graph(shape_key"),
    "speculative.multi_layer_eagle_draft_extend": ("runner.raw_bs = ", "out = runner.replay("),
    "speculative.frozen_kv_mtp": ("self.raw_bs = ", "self._replay_graph(shape_key"),
}


@pytest.mark.upstream
@pytest.mark.parametrize("name", TOLD)
def test_upstreams_runners_know_the_batch_before_they_replay(name):
    source = inspect.getsource(importlib.import_module(f"sglang.srt.{name}_cuda_graph_runner"))
    said, replayed = map(source.find, TOLD[name])
    assert 0 < said < replayed and "captured_req_width" in source


@pytest.mark.upstream
def test_upstreams_one_graph_of_all_steps_is_prepared_as_the_others_are():
    module = importlib.import_module("sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner")
    one_graph = module.OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    assert one_graph.prepare is module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare
