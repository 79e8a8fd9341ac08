"""The side-by-side benchmark without its peers: bytes and truths, order and rotation, what is left out, how it is shown."""

import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from peers import cases, engine, formats, install, kt, measure, report, worker  # noqa: E402
from peers.cases import Limits, Shape, Variant  # noqa: E402

SMALL = Shape(256, 128, 6, 2)
ZEN4 = frozenset("avx2 fma f16c bmi2 avx sse42 avx512f avx512bw avx512vbmi avx512vnni avx512bf16".split())
SAPPHIRE = ZEN4 | {"amxtile", "amxint8", "amxbf16"}


def e2m1(nibbles):
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[nibbles]


def e4m3(codes):
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent.astype(int) - 10))
    return np.where(codes >> 7, -size, size)


def nibbles(codes):
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def decoded(fmt, m):
    """The checkpoint's bytes read one format at a time, independent of how they were made."""
    if fmt == "bf16":
        return (m.codes.astype(np.uint32) << 16).view(np.float32)
    if fmt == "f16":
        return m.codes.view(np.float16)
    if fmt == "fp8_block":
        return e4m3(m.codes) * m.scales.repeat(128, 0).repeat(128, 1)[: m.codes.shape[0], : m.codes.shape[1]]
    if fmt == "fp8_channel":
        return e4m3(m.codes) * m.scales[:, None]
    if fmt == "mxfp8":
        return e4m3(m.codes) * (2.0 ** (m.scales.astype(int) - 127)).repeat(32, 1)
    if fmt == "mxfp4":
        return e2m1(nibbles(m.codes)) * (2.0 ** (m.scales.astype(int) - 127)).repeat(32, 1)
    if fmt == "nvfp4":
        return e2m1(nibbles(m.codes)) * e4m3(m.scales).repeat(16, 1) * m.global_scale
    if fmt == "int4_g32":
        return (nibbles(m.codes) - 8.0) * (m.scales.astype(np.uint32) << 16).view(np.float32).repeat(32, 1)
    if fmt == "int4_zeros":
        return (nibbles(m.codes) - m.zeros.astype(float).repeat(m.group, 1)) * m.scales.view(np.float16).repeat(m.group, 1)
    words = m.codes.T.repeat(8, 1) >> (4 * np.arange(m.codes.shape[0] * 8, dtype=np.uint32) % 32)
    return ((words & 15) - 8.0) * m.scales.T.repeat(m.group, 1)


@pytest.mark.parametrize("fmt", formats.MAKERS)
@pytest.mark.parametrize("columns", [128, 192])
def test_stored_bytes_mean_the_values_of_the_truth_and_are_near_the_weights(fmt, columns):
    w = np.random.default_rng(1).standard_normal((160, columns), dtype=np.float32)
    m = formats.MAKERS[fmt](w)
    assert np.allclose(decoded(fmt, m), m.values, rtol=1e-6, atol=0)
    assert np.linalg.norm(m.values - w) / np.linalg.norm(w) < (0.2 if cases.BITS[fmt] < 5 else 0.04)


@pytest.mark.parametrize("fmt", formats.MAKERS)
def test_a_large_matrix_repeats_the_bytes_of_its_first_rows(fmt):
    m = formats.random_matrix(fmt, 320, 128, np.random.default_rng(2), whole=False)
    values = decoded(fmt, m)
    assert values.shape == (320, 128)
    assert (values[128:256] == values[:128]).all() and (values[256:] == values[:64]).all()


def test_the_truth_is_the_sum_of_weighted_swiglu_experts():
    def matrix(*rows):
        return formats.Matrix(np.zeros(0), values=np.array(rows, np.float32))

    one = {"gate": matrix([1, 0]), "up": matrix([0, 2]), "down": matrix([3], [5])}
    other = {"gate": matrix([0, 0]), "up": matrix([1, 1]), "down": matrix([1], [1])}
    out = formats.truth([one, other], np.array([[2.0, 3.0]]), np.array([[0, 1]]), np.array([[0.5, 0.5]]))
    silu = 2 / (1 + np.exp(-2))
    assert out == pytest.approx(np.array([[0.5 * 3 * 6 * silu, 0.5 * 5 * 6 * silu]]))
    assert formats.relative_error(np.full((1, 2), np.nan), out) == float("inf")
    assert formats.relative_error(out * 1.01, out) == pytest.approx(0.01)


def test_every_format_of_ours_has_a_peer_and_every_variant_known_bytes():
    names = [variant.name for variant in cases.VARIANTS]
    assert len(set(names)) == len(names)
    for variant in cases.VARIANTS:
        assert variant.format in formats.MAKERS or variant.format in formats.GGML
        assert cases.bits(variant) > 0 and variant.family in cases.FAMILIES
    for family in cases.FAMILIES:
        assert {v.engine for v in cases.VARIANTS if v.family == family} > {"lk"}


def test_bytes_and_products_are_those_of_the_issue():
    mxfp4 = next(v for v in cases.VARIANTS if v.name == "lk-mxfp4")
    assert cases.expert_bytes(mxfp4, cases.SHAPES[0]) == 3 * 2048 * 768 * 4.25 / 8
    assert cases.flops(cases.SHAPES[1], 2) == 2 * 2 * 6 * 3 * 4096 * 2048
    assert [cases.distinct(cases.SHAPES[0], t) for t in (1, 8, 512)] == [8, 64, 128]
    assert cases.layers(mxfp4, SMALL, 10**6) == -(-8 * 10**6 // (6 * 3 * 256 * 128 * 4.25 / 8))
    assert cases.layers(mxfp4, cases.SHAPES[1], 32 << 20) == 1


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_an_expert_comes_again_only_after_all_others(tokens):
    walked = np.concatenate([ids.ravel() for ids in cases.routes(SMALL, tokens)])
    assert all(len(set(row)) == SMALL.top_k for ids in cases.routes(SMALL, tokens) for row in ids)
    assert sorted(walked[: SMALL.experts]) == list(range(SMALL.experts))


def test_what_cannot_run_says_why():
    q4_k = next(v for v in cases.VARIANTS if v.name == "kt-gguf-q4_K")
    vnni = next(v for v in cases.VARIANTS if v.name == "kt-rawint4-avxvnni")
    assert q4_k.refuses(cases.SHAPES[2], ZEN4) == "hidden and width must be divisible by 256"
    assert q4_k.refuses(cases.SHAPES[0], ZEN4) == ""
    assert vnni.refuses(cases.SHAPES[0], ZEN4) == "the processor lacks avx_vnni"


def test_slow_peers_are_left_out_with_many_tokens_and_ours_never_for_being_behind():
    ours, peer = Variant("a", "lk", "f", "bf16", ""), Variant("b", "kt", "f", "bf16", "")
    limits = Limits()
    assert cases.left_out(peer, 8, 1.0, 0.1, limits) == ""
    assert cases.left_out(peer, 128, 1.0, 0.1, limits) == "10.0 times slower than the fastest peer with fewer tokens"
    assert cases.left_out(peer, 128, 0.3, 0.1, limits) == ""
    assert cases.left_out(peer, 2048, 0.3, 0.1, limits).startswith("3.0 times")
    assert cases.left_out(ours, 2048, 1.0, 0.1, limits) == ""
    assert cases.left_out(ours, 2048, 20.0, 0.1, limits) == "one call would take 20 s"
    assert [cases.repeats(seconds, limits) for seconds in (0.001, 0.5, 2.0, 4.0)] == [(4, 4), (2, 2), (1, 1), (1, 0)]


class FakePark:
    """A call of ``seconds``. Waking takes a while; a caller that waits awake slows the workers down by a third."""

    WAKING = 60e-6

    def __init__(self, seconds):
        self.seconds, self.now, self.sleep, self.slept = seconds, 0.0, 0.0, []

    def begin(self, sleep, look, nap):
        self.sleep = sleep / 1e9

    def call(self):
        woken = self.sleep + self.WAKING
        self.now += woken if woken > self.seconds else woken + 4 / 3 * (self.seconds - woken)
        self.slept.append(self.sleep)

    def end(self):
        return 1


@pytest.mark.parametrize("seconds", [0.0006, 0.0012, 0.01, 0.3, 2.0])
@pytest.mark.parametrize("guess", [None, 0.5, 1.02, 3])
def test_the_parked_clock_settles_on_the_duration_and_counts_no_call_that_ended_in_the_sleep(monkeypatch, seconds, guess):
    park = FakePark(seconds)
    monkeypatch.setattr(kt.time, "perf_counter", lambda: park.now)
    clock = kt.ParkedClock(park, guess and guess * seconds)
    times = [clock.time(park.call) for _ in range(60)]
    found = [lasted for lasted in times if lasted is not None]
    assert len(found) > 20
    assert found == pytest.approx([seconds] * len(found), rel=0.08)
    assert statistics.median(found) == pytest.approx(seconds, rel=0.05 if seconds < 0.01 else 0.02)
    assert all(sleep < seconds for sleep, lasted in zip(park.slept, times) if lasted is not None)


class FakeBound(engine.Bound):
    def __init__(self, layer, x):
        self.layer, self.result = layer, np.zeros(x.shape)

    def at(self, ids):
        def call():
            self.layer.visited.append((self.layer, ids))
            self.result[:] = np.nan if self.layer.broken else 1

        return call

    def poison(self):
        self.result[:] = np.nan

    def out(self):
        return self.result


class FakeLayer(engine.Layer):
    def __init__(self, visited, broken):
        self.visited, self.broken = visited, broken

    def bind(self, x, routing):
        return FakeBound(self, x)


class FakeEngine(engine.Engine):
    about = {"library": "fake", "version": "1", "build": "b"}

    def __init__(self, threads, cache, broken=False):
        self.visited, self.broken = [], broken

    def offers(self, variant):
        return ""

    def layer(self, variant, shape, experts):
        assert len(experts) == shape.experts
        return FakeLayer(self.visited, self.broken)


def fake_worker(monkeypatch, **changes):
    monkeypatch.setattr(engine, "make", lambda name, *arguments: FakeEngine(*arguments, **changes))
    return worker.Worker("lk", 1, Path())


def test_calls_go_through_all_layers_before_the_next_experts(monkeypatch):
    made = fake_worker(monkeypatch)
    made.load("lk-bf16", [*vars(SMALL).values()], 3)
    times = made.time("lk-bf16", 1, 4, 0.0)
    assert len(times) == 4
    visited = made.engine.visited
    assert len(visited) == 4 + 2
    assert len({id(layer) for layer, _ in visited[:3]}) == 3 and len({ids.tobytes() for _, ids in visited[:3]}) == 1
    assert visited[3][1].tobytes() != visited[0][1].tobytes()


def test_a_kernel_that_computes_nothing_is_refused_instead_of_timed(monkeypatch):
    made = fake_worker(monkeypatch, broken=True)
    made.load("kt-bf16", [*vars(SMALL).values()], 1)
    with pytest.raises(RuntimeError) as error:
        made.time("kt-bf16", 2, 4, 0.0)
    assert str(error.value) == "kt-bf16, 2 tokens: the result is not finite or has empty rows"
    assert made.check("kt-bf16")["error"] == float("inf")


def test_a_clock_that_never_settles_ends(monkeypatch):
    made = fake_worker(monkeypatch)
    made.load("kt-bf16", [*vars(SMALL).values()], 1)
    never = engine.Clock()
    never.time = lambda call: None
    monkeypatch.setattr(made.engine, "clock", lambda guess: never)
    monkeypatch.setattr(worker, "PATIENCE", (60, 0.0))
    with pytest.raises(RuntimeError) as error:
        made.time("kt-bf16", 1, 4, 0.0)
    assert "no steady duration" in str(error.value)


class FakeProcess:
    """Answers like an engine's process; ``log`` has all requests of all of them."""

    log: list = []
    answers = {"lk-bf16": 0.001, "kt-bf16": 0.002, "kt-bf16-avx2": 0.5, "llama-bf16": 0.004}
    deadly: set = set()  # (variant, tokens, or "load") that ends the process
    reads = itertools.count(10)

    def __init__(self, engine_name, threads, cache, log):
        self.engine, self.about = engine_name, {"library": engine_name, "version": "1", "build": "b", "isa": "i"}
        self.loaded = set()

    def ask(self, request, *arguments):
        self.log.append((self.engine, request, *arguments))
        case = {"load": (*arguments[:1], "load"), "time": arguments[:2]}.get(request)
        if case in self.deadly:
            raise measure.PeerDied(f"crashed: signal 11 (Segmentation fault) at {request}")
        if request == "load":
            self.loaded.add(arguments[0])
        if request == "offers":
            return ""
        if request == "check":
            if arguments[0] == "llama-bf16":
                raise measure.PeerDied("crashed: signal 4 (Illegal instruction) at check")
            return {"error": 1.0 if arguments[0] == "kt-bf16" and self.wrong else 1e-3, "allowed": 8e-3}
        if request == "time":
            variant, tokens, few, _ = arguments
            assert variant in self.loaded
            return [self.answers[variant] * tokens] * few
        if request == "machine":
            return {"read": float(next(self.reads))}
        return 400.0

    def close(self):
        self.log.append((self.engine, "close"))


@pytest.fixture
def run(monkeypatch):
    FakeProcess.log, FakeProcess.reads, FakeProcess.wrong, FakeProcess.deadly = [], itertools.count(10), False, set()
    monkeypatch.setattr(measure, "Process", FakeProcess)
    monkeypatch.setattr(install, "cpu_flags", lambda: ZEN4)
    plan = measure.Plan(cases.SHAPES[:1], (1, 8, 128), ("bf16",), ("lk", "kt", "llama"), 2, Path(), Path("log"), 1 << 20)
    return measure.Run(plan, lambda text: None)


def measured(run):
    run.check()
    return list(run.measure())


def test_variants_take_turns_twice_and_the_reader_runs_between_any_two(run):
    found = measured(run)
    timed = [entry for entry in FakeProcess.log if entry[1] in ("time", "machine")]
    first = timed[: timed.index(next(e for e in timed if e[1] == "time" and e[3] == 8)) - 1]
    assert [entry[2] if entry[1] == "time" else "read" for entry in first] == [
        "read", "lk-bf16", "read", "kt-bf16", "read", "kt-bf16-avx2", "read",
        "lk-bf16", "read", "kt-bf16", "read", "kt-bf16-avx2", "read",
    ]  # fmt: skip
    ours = next(case for case in found if case.variant.name == "lk-bf16" and case.tokens == 1)
    assert ours.reads == [10, 11, 13, 14]
    row = ours.row(run.dot)
    assert row["read_gb_per_s"] == 12 and row["calls"] == 8 and row["seconds"] == 0.001
    assert row["gb_per_s"] == pytest.approx(8 * 3 * 2048 * 768 * 2 / 1e6)
    assert row["dot_ratio"] == pytest.approx(2 * 8 * 3 * 2048 * 768 / 1e6 / 400)


def test_a_peer_that_dies_or_is_wrong_is_named_and_has_no_figure(run):
    FakeProcess.wrong = True
    found = measured(run)
    assert run.unfit["llama-bf16"] == "crashed: signal 4 (Illegal instruction) at check"
    assert run.unfit["kt-bf16"] == "wrong: relative error 1.0e+00, 8.0e-03 allowed"
    rows = {(case.variant.name, case.tokens): case.row(run.dot) for case in found}
    assert rows["kt-bf16", 8]["left_out"].startswith("wrong") and "seconds" not in rows["kt-bf16", 8]
    assert "seconds" in rows["lk-bf16", 8]
    assert ("llama", "close") in FakeProcess.log


def timed(variant):
    return [entry[3] for entry in FakeProcess.log if entry[1:3] == ("time", variant)]


def test_a_crash_leaves_its_variant_out_and_the_run_goes_on(run):
    FakeProcess.deadly = {("kt-bf16", 8)}
    rows = {(case.variant.name, case.tokens): case.row(run.dot) for case in measured(run)}
    assert rows["kt-bf16", 8]["left_out"] == "crashed: signal 11 (Segmentation fault) at time" and "seconds" not in rows["kt-bf16", 8]
    assert "seconds" in rows["kt-bf16", 1] and ("kt-bf16", 128) not in rows and timed("kt-bf16") == [1, 1, 8]
    assert "seconds" in rows["kt-bf16-avx2", 8] and "seconds" in rows["lk-bf16", 128]


def test_after_a_crash_the_engines_other_variants_are_built_again_and_the_reader_looks_anew(run):
    FakeProcess.deadly = {("kt-bf16", 8)}
    measured(run)
    log = [entry[:3] for entry in FakeProcess.log]
    crash = log.index(("kt", "close"))
    assert log[crash - 1] == ("kt", "time", "kt-bf16")
    rest = [entry for entry in log[crash:] if entry[1] != "about"]
    assert [entry[:2] for entry in rest[:5]] == [("kt", "close"), ("lk", "machine"), ("kt", "load"), ("lk", "machine"), ("kt", "time")]
    assert [entry[2] for entry in log[crash:] if entry[1] == "load"] == ["kt-bf16-avx2"]


def test_an_engine_that_crashes_twice_is_left_out_of_the_family(run, monkeypatch):
    more = dataclasses.replace(next(v for v in cases.VARIANTS if v.name == "kt-bf16"), name="kt-bf16-other")
    monkeypatch.setattr(FakeProcess, "answers", {**FakeProcess.answers, "kt-bf16-avx2": 0.003, more.name: 0.002})
    FakeProcess.deadly = {("kt-bf16", 1), ("kt-bf16-avx2", 8)}
    found = list(run._family(cases.SHAPES[0], [*run.variants("bf16"), more]))
    rows = {(case.variant.name, case.tokens): case.row(400.0) for case in found}
    assert rows["kt-bf16", 1]["left_out"] == rows["kt-bf16-avx2", 8]["left_out"] == "crashed: signal 11 (Segmentation fault) at time"
    assert "seconds" in rows["kt-bf16-other", 1]
    assert rows["kt-bf16-other", 8]["left_out"] == "kt crashed twice with this format and shape"
    assert ("kt-bf16-other", 128) not in rows and timed("kt-bf16-other") == [1, 1]
    assert "seconds" in rows["llama-bf16", 128]


def test_a_crash_while_layers_are_built_is_the_result_of_that_variant(run):
    FakeProcess.deadly = {("kt-bf16-avx2", "load")}
    rows = {(case.variant.name, case.tokens): case.row(run.dot) for case in measured(run)}
    assert rows["kt-bf16-avx2", 8]["left_out"] == "crashed: signal 11 (Segmentation fault) at load"
    assert "seconds" in rows["kt-bf16", 128]


FATAL_WORKER = """
import os, signal
import numpy as np
from peers import engine, worker

class Bound(engine.Bound):
    def __init__(self, x): self.result = np.ones(x.shape)
    def at(self, ids): return lambda: len(self.result) == 3 and os.kill(os.getpid(), signal.SIGSEGV)
    def poison(self): print("its own last words", flush=True)
    def out(self): return self.result

class Layer(engine.Layer):
    def bind(self, x, routing): return Bound(x)

class Native(engine.Engine):
    about = {"library": "fatal"}
    def __init__(self, threads, cache): pass
    def offers(self, variant): return ""
    def layer(self, variant, shape, experts): return Layer()

engine.make = lambda *arguments: Native(*arguments[1:])
if __name__ == "__main__":
    import sys
    worker.main(*sys.argv[1:])
"""


def test_a_real_process_that_kills_itself_is_a_result_with_its_signal_and_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "fatal_worker.py").write_text(FATAL_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "WORKER", "fatal_worker")
    log = tmp_path / "log"
    log.write_text("words of another engine\n")
    process = measure.Process("kt", 1, tmp_path, log)
    try:
        process.ask("load", "kt-bf16", [*vars(SMALL).values()], 1)
        assert len(process.ask("time", "kt-bf16", 1, 1, 0.0)) == 1
        with pytest.raises(measure.PeerDied) as death:
            process.ask("time", "kt-bf16", 3, 1, 0.0)
        assert str(death.value) == "crashed: signal 11 (Segmentation fault) at time, having said: its own last words"
    finally:
        process.close()


def test_kernels_are_left_out_by_pattern(run):
    run.plan = dataclasses.replace(run.plan, without=("*-avx2", "llama-*"))
    assert {case.variant.name for case in measured(run)} == {"lk-bf16", "kt-bf16"}


def test_a_peer_far_behind_is_not_measured_with_many_tokens(run):
    rows = {(case.variant.name, case.tokens): case.row(run.dot) for case in measured(run)}
    assert "seconds" in rows["kt-bf16-avx2", 8]
    assert rows["kt-bf16-avx2", 128]["left_out"] == "one call would take 64 s"
    assert "seconds" in rows["kt-bf16", 128]


def test_too_little_memory_is_said_before_anything_is_loaded(run, monkeypatch):
    monkeypatch.setattr(measure, "available_bytes", lambda: 1e9)
    with pytest.raises(MemoryError) as error:
        measured(run)
    assert str(error.value).startswith("shape 2048,768,128,8, bf16: 3 kernels need 5.1 GB") and "--engine" in str(error.value)
    assert not any(entry[1] == "load" for entry in FakeProcess.log)


def stored(run):
    rows = [case.row(run.dot) for case in measured(run)]
    run.about["lk"] = {"library": "sgl_kernel_ext", "isa": "avx512_bf16"}
    return {"machine": {**measure.facts(run), "cpu": "Test CPU"}, "rows": rows}


def test_the_table_sets_ours_against_the_fastest_peer_of_the_family(run):
    text = report.markdown(stored(run))
    lines = text.splitlines()
    assert lines[0].startswith("Test CPU, 2 threads") and "ours `avx512_bf16`" in lines[0]
    (row,) = (line for line in lines if line.startswith("| bf16"))
    assert row.startswith("| bf16 | 2.00 (1 : 2) | 2.00 (8 : 16) | 2.00 (128 : 256) | kt-bf16 |")
    assert lines[-3] == "Ours is slower in 0 of 3 comparisons."
    assert lines[-1] == "Not measured here: llama-bf16 (crashed: signal 4 (Illegal instruction) at check)."


def test_every_case_is_in_the_long_table(run):
    lines = report.markdown(stored(run), every=True).splitlines()
    assert sum(line.startswith("|") and "kt-bf16-avx2" in line for line in lines) == 1
    assert sum(line.startswith("|") for line in lines) == 2 + 3


def test_a_peer_ahead_of_ours_is_bold_and_counted(run, monkeypatch):
    monkeypatch.setitem(FakeProcess.answers, "kt-bf16", 0.0005)
    text = report.markdown(stored(run))
    assert "| **0.50** (1 : 0.5) |" in text
    assert "Ours is slower in 3 of 3 comparisons; 2048, 768, 128, 8: bf16 with 1 (0.50 × kt-bf16), bf16 with 8 (" in text


def test_what_crashed_is_below_the_table_once(run):
    FakeProcess.deadly = {("kt-bf16", 8)}
    lines = report.markdown(stored(run)).splitlines()
    assert lines[-3] == "Left out: kt-bf16 at 2048,768,128,8, tokens 8 (crashed: signal 11 (Segmentation fault) at time)."
    FakeProcess.deadly = {("kt-bf16", "load")}
    assert report.markdown(stored(run)).count("crashed: signal 11") == 1


def result(tokens, seconds, name, spread=0.0, share=0.5):
    return {"tokens": tokens, "seconds": seconds, "name": name, "engine": name.split("-")[0], "spread": spread, "read_ratio": share, "dot_ratio": share}


def test_the_table_names_each_fastest_peer_where_it_begins_and_marks_what_was_disturbed():
    by_tokens = {
        1: [result(1, 1.0, "lk-a"), result(1, 2.0, "kt-a")],
        8: [result(8, 1.0, "lk-a", share=0.7), result(8, 2.0, "kt-a"), result(8, 1.5, "llama-a", spread=0.3, share=0.4)],
        32: [result(32, 0.1234, "lk-a", share=0.8), result(32, 1.5, "llama-a", share=0.1)],
        128: [result(128, 1.0, "lk-a", share=0.9)],
    }
    assert report.peers(by_tokens) == "kt-a, llama-a from 8"
    assert [report.versus(rows) for rows in by_tokens.values()] == ["2.00 (1000 : 2000)", "~1.50 (1000 : 1500)", "12.16 (123 : 1500)", "–"]
    assert report.shares(by_tokens, "read") == "60 % : 45 %" and report.shares(by_tokens, "dot") == "90 % : 10 %"


def test_a_result_is_read_back_and_anything_else_refused(run, tmp_path):
    made = stored(run)
    report.store(tmp_path / "a.json", made["machine"], made["rows"])
    assert report.load(tmp_path / "a.json") == json.loads(json.dumps(made))
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError) as error:
        report.load(tmp_path / "b.json")
    assert str(error.value).endswith("b.json is no result of `peers run --json`")


def test_peers_are_built_and_chosen_for_the_processor():
    assert install.ggml_build(ZEN4) == "zen4" and install.ggml_build(SAPPHIRE) == "sapphirerapids"
    assert install.kt_variant("zen4") == "avx512_bf16" and install.kt_variant("sapphirerapids") == "amx"
    assert install.kt_variant("haswell") == "avx2"
    with pytest.raises(RuntimeError) as error:
        install.ggml_build(frozenset({"avx"}))
    assert "AVX2" in str(error.value)


def test_a_packed_folder_holds_what_its_machine_needs_and_no_more(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    kt_parts, ggml = install.kt_folder(cache, "3.12"), install.ggml_folder(cache, "sapphirerapids")
    for file in ("kt_kernel/_kt_kernel_ext_amx.x.so", "kt_kernel/_kt_kernel_ext_avx2.x.so", "kt_kernel.libs/libnuma.so"):
        (kt_parts / file).parent.mkdir(parents=True, exist_ok=True)
        (kt_parts / file).write_bytes(b"1")
    ggml.mkdir()
    (ggml / "libggml-cpu.so.0").write_bytes(b"2")
    monkeypatch.setattr(install, "_gomp", lambda folder: folder / "libggml-cpu.so.0")
    monkeypatch.setattr(install, "install_park", lambda folder: (folder / "park.so").write_bytes(b"3"))
    monkeypatch.setattr(install, "require_tools", lambda: None)
    size = install.pack(tmp_path / "out", cache, "3.12", ["sapphirerapids"], None, print)
    names = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out" / "cache").rglob("*") if file.is_file()}
    assert names == {
        "cache/park.so", "cache/ggml-0.3.36-sapphirerapids/libggml-cpu.so.0", "cache/ggml-0.3.36-sapphirerapids/libgomp.so.1",
        "cache/kt-0.7.2-cp312/kt_kernel/_kt_kernel_ext_amx.x.so", "cache/kt-0.7.2-cp312/kt_kernel.libs/libnuma.so",
    }  # fmt: skip
    assert (tmp_path / "out/peers/__main__.py").exists() and size < 1 << 20
    monkeypatch.setattr(install, "MOST_BYTES", 10)
    with pytest.raises(RuntimeError) as error:
        install.pack(tmp_path / "out", cache, "3.12", ["sapphirerapids"], None, print)
    assert "name fewer --cpu" in str(error.value)


def test_missing_build_tools_are_named_with_the_way_to_get_them(monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda tool: None if tool == "cmake" else tool)
    with pytest.raises(RuntimeError) as error:
        install.require_tools()
    assert str(error.value).startswith("cmake not found") and "apt-get install cmake g++" in str(error.value)
