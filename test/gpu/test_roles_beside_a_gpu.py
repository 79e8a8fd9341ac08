"""The recite model on a GPU, in every role and both ways of handing over: the known tokens, alone and in a batch."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers", reason="needs what SGLang needs")
pytestmark = pytest.mark.gpu

import servers  # noqa: E402
from held import Held  # noqa: E402
from servers import CPU, EAGER, FUNCTIONS, MIXED, RESIDENT, STOCK, processes, server  # noqa: E402

WAYS = [STOCK, RESIDENT, CPU, EAGER, FUNCTIONS, MIXED]
TEXTS = servers.known()
PROMPTS = [prompt for prompt, _ in TEXTS]
EXPECTED = [expected for _, expected in TEXTS]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with servers.serve(WAYS, tmp_path_factory.mktemp("recite")) as up:
        yield up


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_prompt_gets_its_known_answer_in_one_batch(running, way):
    found = server(running, way).tokens(PROMPTS, 48)
    wrong = [i for i, (a, b) in enumerate(zip(found, EXPECTED)) if a != b]
    assert wrong == []


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_prompt_gets_its_known_answer_alone(running, way):
    asked = server(running, way)
    wrong = [i for i, (prompt, expected) in enumerate(TEXTS) if asked.tokens([prompt], 48)[0] != expected]
    assert wrong == []


def test_the_table_of_roles_is_in_the_log(running):
    log = server(running, MIXED).log.read_text()
    assert "4 MoE layers: 2 resident, 2 cpu" in log
    assert "4 MoE layers: 4 resident" in server(running, RESIDENT).log.read_text()
    assert "Hybrid MoE" not in server(running, STOCK).log.read_text()


def test_graphs_are_captured_beside_cpu_experts(running):
    assert "Capture cuda graph" in server(running, CPU).log.read_text() or "Capturing" in server(running, CPU).log.read_text()


@pytest.mark.parametrize("way", [CPU, FUNCTIONS], ids=lambda way: way.name)
@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_what_pads_a_captured_batch_reaches_no_expert(running, way, count):
    """Each layer computes a row for each token but an answer's last, which the next step may have computed before its end was
    known. Captured are 1, 2, 4, 8, 12 …"""
    asked, tokens, layers = server(running, way), 16, 4
    before = asked.metric("sglang_lk_rows_total")
    asked.tokens([[7]] * count, tokens)
    rows = asked.metric("sglang_lk_rows_total") - before
    assert count * tokens * layers <= rows <= count * (tokens + 1) * layers


def test_a_server_that_is_stopped_as_a_whole_goes_on_with_the_right_answers(running):
    asked = server(running, CPU)
    with ThreadPoolExecutor(1) as pool:
        # This takes seconds, so that the stop falls into a request.
        answers = pool.submit(lambda: [asked.tokens(PROMPTS, 48) for _ in range(20)])
        time.sleep(0.2)
        assert not answers.done()
        with servers.stopped(asked.process.pid):
            time.sleep(5)
            assert not answers.done()
        assert answers.result(timeout=120) == [EXPECTED] * 20
    assert asked.process.poll() is None and "The server ends" not in asked.log.read_text()


def test_an_engine_that_stalls_ends_the_server_within_ten_seconds_with_the_layer_named(running):
    """The thread that answers the GPU is held still from outside, as a debugger does it."""
    victim = server(running, CPU)
    everything = {victim.process.pid} | processes.descendants(victim.process.pid)
    threads = [(pid, tid) for pid in everything for tid in _threads(pid) if _comm(pid, tid) == "lk-handover"]
    assert len(threads) == 1
    with Held(threads[0][1]):
        began = time.monotonic()
        try:
            servers.ask(victim.port, "POST", "/generate", {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 8}}, timeout=10)
        except OSError:
            pass  # the connection ends with the server
        while time.monotonic() - began < 10 and _alive(everything):
            time.sleep(0.1)
        took = time.monotonic() - began
    assert not _alive(everything), f"after {took:.1f} s processes {_alive(everything)} are left"
    assert "the CPU engine gave no answer for" in victim.log.read_text() and "model.layers." in victim.tail()


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def _comm(pid: int, tid: int) -> str:
    with open(f"/proc/{pid}/task/{tid}/comm") as file:
        return file.read().strip()


def _alive(pids: set[int]) -> set[int]:
    return pids & processes.parents().keys()
