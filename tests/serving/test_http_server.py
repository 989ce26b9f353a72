"""A server under many clients, slow ones and ones that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from regard.serving import batcher, http_server
from regard.serving.http_server import Server
from tests.serving.conftest import ask, shout


def test_two_hundred_clients_at_once_lose_nothing():
    sizes = []

    def run(texts, settings):
        sizes.append(len(texts))
        time.sleep(0.02)
        return [text.upper() for text in texts]

    with Server(shout(run), "shouter", port=0) as running, ThreadPoolExecutor(200) as clients:
        found = list(clients.map(lambda n: ask(running, {"text": [f"a{n}", f"b{n}"]}), range(200)))
    assert found == [(200, {"answers": [f"A{n}", f"B{n}"]}) for n in range(200)]
    assert sum(sizes) == 400
    assert max(sizes) > 2  # requests were run together
    assert max(sizes) <= batcher.EXAMPLES_PER_RUN


def test_a_full_queue_is_said(monkeypatch):
    started, go = threading.Event(), threading.Event()
    monkeypatch.setattr(batcher, "MAX_WAITING", 2)

    def run(texts, settings):
        started.set()
        assert go.wait(60)
        return texts

    with Server(shout(run), "shouter", port=0) as running, ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, running, {"text": "ah"})]
        assert started.wait(60)
        asked += [clients.submit(ask, running, {"text": "ah"}) for _ in range(7)]
        while sum(one.done() for one in asked) < 5:
            time.sleep(0.01)
        go.set()
        found = [one.result() for one in asked]
    refused = [body for status, body in found if status == 503]
    assert refused == [{"error": "too many requests wait", "hint": "try again later"}] * 5
    assert [status for status, _ in found].count(200) == 3


def test_a_client_that_leaves_is_not_answered(monkeypatch):
    monkeypatch.setattr(http_server, "SECONDS_BETWEEN_LOOKS", 0.01)
    seen, go = [], threading.Event()

    def run(texts, settings):
        seen.extend(texts)
        go.wait(30)
        return texts

    with Server(shout(run), "shouter", port=0) as running, ThreadPoolExecutor(2) as clients:
        first = clients.submit(ask, running, {"text": "first"})
        while seen != ["first"]:
            time.sleep(0.01)
        gone = socket.create_connection(("127.0.0.1", running.port))
        body = json.dumps({"text": "gone"})
        gone.sendall(
            f"POST /shout HTTP/1.1\r\nHost: {running.address}\r\nAuthorization: Bearer {running.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        while ask(running, None, path="/health", method="GET")[1]["waiting"] != 1:
            time.sleep(0.01)
        gone.close()
        time.sleep(1)
        second = clients.submit(ask, running, {"text": "second"})
        while ask(running, None, path="/health", method="GET")[1]["waiting"] != 2:
            time.sleep(0.01)  # the withdrawn request is dropped when the model is free
        go.set()
        assert (first.result()[0], second.result()[0]) == (200, 200)
    assert seen == ["first", "second"]


def test_a_slow_sender_holds_up_nobody(server):
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(
            f"POST /shout HTTP/1.1\r\nHost: {server.address}\r\nAuthorization: Bearer {server.token}\r\n"
            'Content-Type: application/json\r\nContent-Length: 14\r\n\r\n{"text"'.encode()
        )
        assert ask(server, {"text": "ah"}) == (200, {"answers": ["AH"]})
        slow.sendall(b': "oh"}')
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_refused(server, monkeypatch, declared):
    monkeypatch.setattr("regard.serving.http_server.MAX_BODY_BYTES", 1000)
    body = b'{"text": "' + b"x" * 2000 + b'"}'
    status, found = ask(server, body if declared else iter([body]))  # else in chunks
    assert status == 413
    assert "1,000 bytes" in found["error"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("the question is empty"), 400, "the question is empty"),
        (torch.OutOfMemoryError("x"), 503, "the model has not enough memory for this request"),
        (ZeroDivisionError("secret"), 500, "the model failed to answer this request"),
    ],
)
def test_errors_of_the_model_are_answered(error, status, said):
    def run(texts, settings):
        raise error

    with Server(shout(run), "shouter", port=0) as running:
        assert ask(running, {"text": "ah"}) == (status, ask(running, {"text": "ah"})[1])
        assert ask(running, {"text": "ah"})[1]["error"] == said


def test_an_answer_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(http_server, "SECONDS_BETWEEN_LOOKS", 0.01)
    go = threading.Event()
    with Server(shout(lambda texts, _: [go.wait(30)]), "shouter", port=0) as running:
        assert ask(running, {"text": "ah"})[0] == 503
        go.set()


def test_wrong_paths_and_bodies_say_what_to_do(server):
    assert ask(server, {"text": "ah"}, path="/translate") == (
        404,
        {"error": "not found", "hint": "send POST /shout, or GET / for the API"},
    )
    assert ask(server, None, method="GET", path="/shout")[0] == 405
    assert ask(server, {"text": 3})[1]["error"] == "text must be a text or a list of texts, got 3"
    assert ask(server, None, method="GET", path="/health")[1]["status"] == "ok"


def test_nothing_is_served_after_the_end(server):
    server.close()
    with pytest.raises(OSError, match="refused"):
        ask(server, {"text": "ah"})
