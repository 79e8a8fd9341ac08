"""The CPU's end of the hand-over, with this process in the GPU's place: it writes requests into the shared memory."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest
import reference
import sgl_kernel_ext as ext
from held import Held
from native import assert_bits_equal, build, run, sleeps_of_worker

HIDDEN, WIDTH, EXPERTS, TOP_K, ROWS = 64, 96, 8, 3, 16
REQUEST, LAYER, DONE, ABORT, EXPIRED = 0, 8, 64, 72, 128  # offsets of Control


class Gpu:
    """Memory as the two ends share it, and what the kernels do with it."""

    def __init__(self, *, layers=1, patience_ms=30_000, rows=ROWS, hidden=HIDDEN, top_k=TOP_K, dtype=np.uint16, spin_us=2000, **options):
        if isinstance(layers, int):
            rng = np.random.default_rng(layers)
            layers = [build(reference.random_layer("bf16", EXPERTS, hidden, WIDTH, rng)) for _ in range(layers)]
        self.layers = layers
        self.native = ext.Handover([sorted(os.sched_getaffinity(0))[0]], spin_us=spin_us, patience_ms=patience_ms)
        self.control, self.x = aligned(256, np.uint8), aligned((rows, hidden), dtype)
        self.ids, self.weights = aligned((rows, top_k), np.int32), aligned((rows, top_k), np.float32)
        self.out = aligned((rows, hidden), dtype)
        self.request = 0
        self.bind()
        name = {np.uint16: "bf16", np.float16: "f16", np.float32: "f32"}[dtype]
        for i, experts in enumerate(self.layers):
            assert self.native.add(f"model.layers.{i}", experts, top_k, name, **options) == i

    def bind(self):
        self.native.bind(
            control=address(self.control), x=address(self.x), ids=address(self.ids), weights=address(self.weights), out=address(self.out),
            x_bytes=self.x.nbytes, out_bytes=self.out.nbytes, routes=self.ids.size, owner=self,
        )  # fmt: skip

    def word(self, offset, kind=ctypes.c_uint64):
        return kind.from_address(address(self.control) + offset)

    def publish(self, x, ids, weights, layer=0):
        for here, given in ((self.x, x), (self.ids, ids), (self.weights, weights)):
            here[: len(given)] = given
        self.out.view(np.uint8)[:] = 0xFF  # NaN
        self.word(LAYER, ctypes.c_uint32).value, self.word(LAYER + 4, ctypes.c_uint32).value = layer, len(x)
        self.request += 1
        self.word(REQUEST).value = self.request

    def collect(self, rows, seconds=60.0):
        until = time.monotonic() + seconds
        while self.word(DONE).value != self.request and time.monotonic() < until:
            time.sleep(0)
        assert self.word(DONE).value == self.request, "no answer"
        return self.out[:rows].copy()

    def ask(self, x, ids, weights, layer=0):
        self.publish(x, ids, weights, layer)
        return self.collect(len(x))


@pytest.fixture
def made():
    gpus = []

    def make(**options) -> Gpu:
        gpus.append(Gpu(**options))
        return gpus[-1]

    yield make
    for gpu in gpus:
        gpu.native.close()


def aligned(shape, dtype):
    count = int(np.prod(shape))
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


def address(array) -> int:
    return array.ctypes.data


def batch(rows, seed=0, dtype=np.uint16):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, HIDDEN), dtype=np.float32)
    x = x.astype(dtype) if dtype != np.uint16 else (x.view(np.uint32) >> 16).astype(np.uint16)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)], np.int32)
    return x, ids, rng.random((rows, TOP_K), dtype=np.float32)


@pytest.mark.parametrize("dtype, out", [(np.uint16, "bf16"), (np.float16, "f16"), (np.float32, "f32")])
@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_an_answer_has_the_bits_of_a_direct_call(made, rows, dtype, out):
    gpu = made(dtype=dtype, scale=1.5)
    given = batch(rows, dtype=dtype)
    assert_bits_equal(gpu.ask(*given), run(gpu.layers[0], *given, scale=1.5, out_dtype=out))


def test_requests_follow_each_other_and_name_their_layer(made):
    gpu = made(layers=3)
    for step in range(30):
        given = batch(1 + step % 4, seed=step)
        assert_bits_equal(gpu.ask(*given, layer=step % 3), run(gpu.layers[step % 3], *given, out_dtype="bf16"))
    stats = gpu.native.stats()
    assert (stats["calls"], stats["steps"], stats["rows"]) == (30, 10, sum(1 + step % 4 for step in range(30)))


def test_padding_at_the_end_costs_nothing_and_is_not_written(made):
    gpu = made()
    x, ids, weights = batch(6)
    ids[4:] = -1
    out = gpu.ask(x, ids, weights)
    assert_bits_equal(out[:4], run(gpu.layers[0], x[:4], ids[:4], weights[:4], out_dtype="bf16"))
    assert (out[4:] == 0xFFFF).all() and gpu.native.stats()["rows"] == 4


def test_a_request_of_padding_alone_is_answered(made):
    gpu = made()
    x, ids, weights = batch(2)
    gpu.ask(x, np.full_like(ids, -1), weights)
    assert gpu.native.stats()["calls"] == 1 and gpu.native.stats()["rows"] == 0


def test_a_row_without_experts_before_others_is_zero(made):
    gpu = made()
    x, ids, weights = batch(3)
    ids[1] = -1
    out = gpu.ask(x, ids, weights)
    assert (out[1] == 0).all()
    assert_bits_equal(out, run(gpu.layers[0], x, ids, weights, out_dtype="bf16"))


def test_the_answer_comes_while_a_python_thread_keeps_the_lock(made):
    gpu = made()
    given = batch(1)
    expected = run(gpu.layers[0], *given, out_dtype="bf16")
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert_bits_equal(gpu.ask(*given), expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_larger_buffers_take_over_where_the_old_ones_were(made):
    gpu = made(rows=2)
    given = batch(2)
    first = gpu.ask(*given)
    assert gpu.native.capacity(0) == 2
    gpu.x, gpu.out, gpu.ids = aligned((9, HIDDEN), np.uint16), aligned((9, HIDDEN), np.uint16), aligned((9, TOP_K), np.int32)
    gpu.weights, gpu.control = aligned((9, TOP_K), np.float32), aligned(256, np.uint8)
    gpu.bind()
    assert gpu.native.capacity(0) == 9
    assert_bits_equal(gpu.ask(*given), first)


def test_host_functions_give_the_same_answer(made):
    gpu = made()
    x, ids, weights = batch(5)
    gpu.x[:5], gpu.ids[:5], gpu.weights[:5] = x, ids, weights
    gpu.out[:] = 0xFFFF
    submit, join = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at) for at in ext.Handover.host_functions)
    ticket = gpu.native.ticket(0, 5)
    assert ticket == gpu.native.ticket(0, 5) != gpu.native.ticket(0, 4)
    for _ in range(3):
        submit(ticket)
        join(ticket)
    assert_bits_equal(gpu.out[:5], run(gpu.layers[0], x, ids, weights, out_dtype="bf16"))


def test_a_request_for_a_layer_that_does_not_exist_is_a_failure_by_name(made):
    gpu = made()
    gpu.publish(*batch(1), layer=7)
    assert gpu.native.failure(ms=5000) == "layer number 7: a request names layer 7, which does not exist"


def test_an_engine_that_gives_no_answer_is_named_and_lets_the_gpu_go(made):
    gpu = made(patience_ms=100)
    stuck = threads("lk-handover", 1)[0]
    with Held(stuck):
        gpu.publish(*batch(1))
        failure = gpu.native.failure(ms=5000)
        assert failure.startswith("model.layers.0: the CPU engine gave no answer for 1")
        assert gpu.word(ABORT).value == 0, "the server says why before the GPU goes on"
        gpu.native.abort()
        assert gpu.word(ABORT).value == 1
    submit, join = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at) for at in ext.Handover.host_functions)
    gpu.out[:] = 0
    join(gpu.native.ticket(0, 1))  # returns, and what was asked for is NaN
    assert (gpu.out[0] == 0xFFFF).all() and (gpu.out[1:] == 0).all()


def test_a_limit_that_the_gpu_saw_pass_is_a_failure(made):
    gpu = made(layers=2)
    gpu.word(EXPIRED).value = 2
    assert gpu.native.failure(ms=5000) == "model.layers.1: the GPU waited for the CPU experts past its limit"


def test_nothing_has_failed_while_all_is_well_and_large_batches_may_take_longer(made):
    gpu = made(patience_ms=60, ns_per_row=20_000_000_000)
    stuck = threads("lk-handover", 1)[0]
    given = batch(1)
    with Held(stuck):
        gpu.publish(*given)
        assert gpu.native.failure(ms=400) == ""
    assert_bits_equal(gpu.collect(1), run(gpu.layers[0], *given, out_dtype="bf16"))


def test_closing_ends_both_threads(made):
    gpu = made()
    assert len(threads("lk-watch", 1)) == len(threads("lk-handover", 1)) == 1
    gpu.native.close()
    assert threads("lk-watch", 0) == threads("lk-handover", 0) == []


def test_an_idle_thread_costs_little(made):
    gpu = made(spin_us=0)
    gpu.ask(*batch(1))
    time.sleep(1.2)
    before, began = time.process_time(), time.monotonic()
    time.sleep(0.5)
    assert (time.process_time() - before) / (time.monotonic() - began) < 0.3


@pytest.mark.parametrize("call, text", [
    (lambda gpu: gpu.native.add("a", gpu.layers[0], 0, "bf16"), "top_k must be at least 1"),
    (lambda gpu: gpu.native.add("a", gpu.layers[0], 1, "f64"), "unknown dtype f64"),
    (lambda gpu: gpu.native.add("a", gpu.layers[0], 1, "bf16", scale=float("nan")), "scale is not finite"),
    (lambda gpu: gpu.native.add("a", gpu.layers[0], 1, "bf16", ns_per_row=-1), "ns_per_row is negative"),
    (lambda gpu: gpu.native.ticket(0, 99), "99 rows do not fit"),
    (lambda gpu: gpu.native.bind(64, 64, 64, 64, 65, 1, 1, 1, gpu), "multiples of 64"),
    (lambda gpu: gpu.native.bind(64, 64, 64, 64, 64, 1, 0, 1, gpu), "must be positive"),
    (lambda gpu: ext.Handover([10**6]), "out of range"),
    (lambda gpu: ext.Handover([0], patience_ms=0), "patience_ms positive"),
])  # fmt: skip
def test_bad_arguments_are_refused_by_name(made, call, text):
    with pytest.raises(ValueError) as error:
        call(made())
    assert text in str(error.value)


def threads(name: str, expected: int) -> list[int]:
    """This process's threads of a name; one that has just been started takes a moment to get it."""
    until = time.monotonic() + 5
    while len(found := [int(task) for task in os.listdir("/proc/self/task") if comm(task) == name]) != expected:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return found


def comm(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""


def test_workers_stay_awake_between_the_layers_of_a_prompt(made):
    """The GPU takes a millisecond or two there, which is longer than workers wait awake for small batches."""
    cpus, rows = sorted(os.sched_getaffinity(0)), 256
    experts = ext.Experts(ext.Engine([cpus[0], cpus[-1]], spin_us=20), "bf16", 1, 1024, 1024)
    gpu = made(layers=[experts], rows=rows, hidden=1024, top_k=1)
    given = np.zeros((rows, 1024), np.uint16), np.zeros((rows, 1), np.int32), np.ones((rows, 1), np.float32)

    def sleeps(call, times=15):
        call()
        before = sum(map(sleeps_of_worker, os.listdir("/proc/self/task")))
        for _ in range(times):
            until = time.perf_counter() + 300e-6
            while time.perf_counter() < until:
                pass
            call()
        return sum(map(sleeps_of_worker, os.listdir("/proc/self/task"))) - before

    direct = min(sleeps(lambda: run(experts, *given)) for _ in range(2))
    # A busy machine keeps the others away for longer: the quietest of some rounds counts.
    assert min(sleeps(lambda: gpu.ask(*given)) for _ in range(8)) < direct / 2
