"""One server of the recite model with its experts on our kernels, asked in every way that a client can ask."""

import json
import threading
import time

import pytest

pytest.importorskip("tokenizers", reason="needs what SGLang needs")
pytestmark = pytest.mark.serve

import recite_server  # noqa: E402
import soak  # noqa: E402

from launch.recite import MODEL  # noqa: E402

TEXTS = soak.known(MODEL, MODEL / "tokenizer.json")
CHUNK = 16  # tokens of prefill per step: prompts of up to 60 tokens take four steps


@pytest.fixture(scope="module")
def server(recite):
    with recite_server.serve(recite["bf16"], flags=("--chunked-prefill-size", str(CHUNK))) as running:
        yield running


def ask(server, ids: list[int], tokens: int, **more) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return recite_server.post(server.port, "/generate", {"input_ids": ids, "sampling_params": sampling, **more})


def test_the_log_says_that_our_kernels_have_the_experts(server):
    log = server.log.read_text()
    assert "Hybrid MoE" in log and "threads" in log


def test_a_batch_gives_each_prompt_its_own_known_answer(server):
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    body = {"input_ids": [ids for ids, _ in TEXTS], "sampling_params": sampling}
    answers = recite_server.post(server.port, "/generate", body)
    assert [answer["output_ids"] for answer in answers] == [expected for _, expected in TEXTS]


def test_a_stream_arrives_in_pieces_and_ends_with_the_same_tokens(server):
    ids, expected = TEXTS[0]
    # What has queued up while the HTTP process had no processor comes as one piece.
    deadline = time.monotonic() + 120
    while True:
        pieces = soak.pieces(server.port, ids, len(expected))
        assert pieces[-1] == expected
        assert all(piece == expected[: len(piece)] for piece in pieces)
        if len(pieces) > len(expected) // 2:
            break
        assert time.monotonic() < deadline, f"{len(pieces)} pieces of {len(expected)} tokens"


def test_openai_clients_get_the_text_streamed_or_whole(server):
    entry = next(e for e in json.loads((MODEL / "expected.json").read_text()) if e["min_margin"] >= soak.MARGIN)
    body = {"model": "recite", "prompt": entry["prompt"], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    whole = recite_server.post(server.port, "/v1/completions", body)
    assert whole["choices"][0]["text"] == entry["text"]
    chat = {"model": "recite", "messages": [{"role": "user", "content": entry["prompt"]}], "max_tokens": 8, "temperature": 0}
    assert recite_server.post(server.port, "/v1/chat/completions", chat)["usage"]["completion_tokens"] > 0


def test_a_prompt_of_several_chunks_goes_on_where_it_should(server):
    ids, expected = max(TEXTS, key=lambda text: len(text[0]))
    prompt = ids + expected[:40]
    assert len(prompt) > 2 * CHUNK
    assert ask(server, prompt, 8)["output_ids"] == expected[40:48]


def test_a_repeated_prompt_comes_out_of_the_radix_cache_unchanged(server):
    ids, expected = TEXTS[1]
    prompt = ids + expected[:24]
    first, second = (ask(server, prompt, 24) for _ in range(2))
    assert second["meta_info"]["cached_tokens"] >= len(prompt) - 1
    assert first["output_ids"] == second["output_ids"] == expected[24:48]


def test_requests_of_many_clients_at_once_are_answered_as_alone(server):
    tally = soak.Tally()
    work = soak.cases(TEXTS, 48, cancelled=0.0, seed=3)
    soak.drive(server.port, work, 8, deadline=float("inf"), tally=tally)
    assert (tally.done, tally.wrong, tally.failed) == (48, [], [])


def test_clients_that_hang_up_leave_nothing_behind_and_harm_nobody(server):
    ids, expected = TEXTS[2]
    gone = [soak.Case(ids, expected, cancel_after=n) for n in (1, 2, 3, 5, 8, 13)]
    threads = [threading.Thread(target=soak.cut_off, args=(server.port, case)) for case in gone]
    for thread in threads:
        thread.start()
    assert ask(server, ids, 48)["output_ids"] == expected
    for thread in threads:
        thread.join()
    assert recite_server.comes_to_rest(server.port)
    assert ask(server, ids, 48)["output_ids"] == expected


def test_a_server_that_nobody_asks_leaves_the_processors_to_others(server):
    """Its workers sleep, and so does upstream's scheduler with ``--sleep-on-idle``, without which it takes a core."""
    assert recite_server.comes_to_rest(server.port)
    time.sleep(1)
    before = recite_server.cpu_seconds(server.pid)
    time.sleep(4)
    assert recite_server.cpu_seconds(server.pid) - before < 1
