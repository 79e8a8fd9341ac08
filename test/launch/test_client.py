"""The client against a made-up server: what comes back is checked, not hoped for."""

import json
import os
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest

from launch import client


@contextmanager
def server(*chunks: str, status: int = 200):
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(chunk.encode())

        def log_message(self, *arguments):
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield http.server_port, requests
        http.shutdown()


def chunk(*ids: int) -> str:
    return "data: " + json.dumps({"output_ids": ids, "text": "w" * len(ids)}) + "\n\n"


DONE = "data: [DONE]\n\n"


def test_ids_are_the_last_chunks_and_times_count_from_the_first_token():
    with server(chunk(5), chunk(5, 6, 7), DONE) as (port, requests):
        texts = []
        answer = client.generate(port, 3, prompt="In the beginning", seen=texts.append)
    assert texts == ["w", "www"]
    assert answer.ids == (5, 6, 7)
    assert answer.decoded == 2
    assert [tokens for _, tokens in answer.arrivals] == [1, 3]
    assert requests[0]["text"] == "In the beginning"
    assert requests[0]["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize(
    ("chunks", "status", "words"),
    [
        ((chunk(5),), 200, "ended before its end mark"),
        ((chunk(5), DONE), 200, "1 tokens came back instead of 3"),
        (('data: {"error": {"message": "out of memory"}}\n\n', DONE), 200, "out of memory"),
        (("busy",), 503, "status 503: busy"),
    ],
)
def test_a_bad_answer_is_one_sentence(chunks, status, words):
    with server(*chunks, status=status) as (port, _), pytest.raises(client.RequestFailed) as error:
        client.generate(port, 3, prompt="x")
    assert words in str(error.value)


def test_a_server_that_is_gone_is_one_sentence():
    with server() as (port, _):
        pass
    with pytest.raises(client.RequestFailed) as error:
        client.generate(port, 3, prompt="x")
    assert f"the server on port {port} broke the connection" in str(error.value)


def test_answers_keep_the_order_of_the_prompts():
    with server(chunk(1), DONE) as (port, requests):
        answers = list(client.generate_all(port, ["a", "b", "c"], 1, 3))
    assert [answer.ids for answer in answers] == [(1,)] * 3
    assert sorted(request["text"] for request in requests) == ["a", "b", "c"]


def test_a_prefill_batch_must_come_back_whole():
    with server("[{}, {}]") as (port, _):
        assert client.prefill(port, [[1, 2], [3, 4]]) > 0
        with pytest.raises(client.RequestFailed) as error:
            client.prefill(port, [[1], [2], [3]])
    assert str(error.value) == "2 answers came back for 3 prompts"


def _interrupt(number, frame):
    raise InterruptedError


def test_an_interruption_does_not_wait_for_open_requests():
    release, arrived = threading.Event(), threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, _interrupt)

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self):
            arrived.wait(30)
            release.wait(30)

        def log_message(self, *arguments):
            """Quiet."""

    try:
        with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as http:
            threading.Thread(target=http.serve_forever, daemon=True).start()
            failed = client.generate_all(http.server_port, ["a", "b"], 1, 2)
            with pytest.raises(InterruptedError):
                next(failed)
            assert not release.is_set()
            release.set()
            http.shutdown()
    finally:
        signal.signal(signal.SIGALRM, before)
