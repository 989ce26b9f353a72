"""Connections: limits of the server, and a clock that closes those which send or read too slowly."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace

import pytest
from uvicorn.server import ServerState

from regard.views.viewer import http as connection
from regard.views.viewer.auth import HEADERS
from regard.views.viewer.describe import Capture
from regard.views.viewer.http import ANSWER_SECONDS, IDLE_SECONDS, TimeoutProtocol, server_config
from regard.views.viewer.server import Viewer


def test_slow_connections_are_closed(tape, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.2)
    with Viewer([Capture(tape, "x")]) as viewer:
        host, _, port = viewer.auth.host.rpartition(":")
        for raw in (
            b"",
            b"GET / HTTP/1.1\r\nHost: ",
            f"GET / HTTP/1.1\r\nHost: {viewer.auth.host}\r\n\r\nGET".encode(),
        ):
            with socket.create_connection((host, int(port)), timeout=5) as peer:
                peer.sendall(raw)
                start = time.monotonic()
                try:
                    while peer.recv(65536):
                        pass
                except ConnectionResetError:
                    pass
                assert time.monotonic() - start < 3


def test_limits_are_set():
    settings = connection.server_config(None)
    assert settings.access_log is False
    assert settings.ws == "none"


def test_a_connection_beyond_the_limit_gets_an_answer_with_all_headers(tape, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    with Viewer([Capture(tape, "x")]) as viewer:
        host, port = "127.0.0.1", viewer.port
        idle = [socket.create_connection((host, port), timeout=5) for _ in range(3)]
        time.sleep(0.2)
        with socket.create_connection((host, port), timeout=5) as peer:
            peer.sendall(f"GET / HTTP/1.1\r\nHost: {viewer.auth.host}\r\n\r\n".encode())
            raw = b""
            while part := peer.recv(65536):
                raw += part
        head, _, body = raw.decode().partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        assert status.startswith("HTTP/1.1 503")
        assert HEADERS.items() <= headers.items()
        assert headers["connection"] == "close"
        assert json.loads(body) == {"error": "too many connections at once", "hint": "close other tabs of the viewer"}
        for peer in idle:
            peer.close()


class Clock:
    """An event loop that only has timers, and time that passes when it is told to."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def time(self):
        return self.now

    def call_later(self, delay, run, *arguments):
        timer = SimpleNamespace(at=self.now + delay, run=run, arguments=arguments)
        timer.cancel = lambda: self.timers.remove(timer) if timer in self.timers else None
        self.timers.append(timer)
        return timer

    def pass_until(self, end):
        while due := [timer for timer in self.timers if timer.at <= end]:
            timer = min(due, key=lambda timer: timer.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.run(*timer.arguments)
        self.now = end


class Wire:
    """A transport that remembers what was written, and how it ended."""

    def __init__(self):
        self.written, self.aborted, self.closed = b"", False, False

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.aborted or self.closed

    def write(self, data):
        self.written += data

    def abort(self):
        self.aborted = True

    def close(self):
        self.closed = True


async def application(scope, receive, send):
    raise AssertionError("no request is complete here")


@pytest.fixture
def opened():
    """A connection that was just made, its transport and its clock."""
    clock, wire = Clock(), Wire()
    protocol = TimeoutProtocol(server_config(application), ServerState(), {}, _loop=clock)
    protocol.connection_made(wire)
    return protocol, wire, clock


class Request:
    def __init__(self, complete):
        self.response_complete, self.disconnected = complete, False


def answer(protocol, *, complete):
    protocol.cycle = Request(complete)


def test_a_connection_that_sends_nothing_is_closed_after_the_idle_time(opened):
    _, wire, clock = opened
    clock.pass_until(IDLE_SECONDS)
    assert not wire.aborted
    clock.pass_until(IDLE_SECONDS * 1.5)
    assert wire.aborted
    assert clock.timers == []


def test_parts_of_a_request_do_not_prolong_a_connection(opened):
    protocol, wire, clock = opened
    for second, part in enumerate(b"GET / HTTP/1.1\r\nHo"):
        clock.pass_until(second)
        if not wire.aborted:
            protocol.data_received(bytes([part]))
    assert wire.aborted
    assert clock.now < 2 * IDLE_SECONDS


def test_an_answer_may_take_longer_than_the_idle_time_but_not_for_ever(opened):
    protocol, wire, clock = opened
    answer(protocol, complete=False)
    clock.pass_until(2 * ANSWER_SECONDS)
    assert not wire.aborted
    clock.pass_until(2 * ANSWER_SECONDS + IDLE_SECONDS)
    assert wire.aborted


def test_a_connection_has_the_idle_time_from_the_end_of_a_long_answer(opened):
    protocol, wire, clock = opened
    answer(protocol, complete=False)
    clock.pass_until(ANSWER_SECONDS - 1)
    protocol.cycle.response_complete = True
    clock.pass_until(ANSWER_SECONDS - 1 + IDLE_SECONDS)
    assert not wire.aborted
    clock.pass_until(ANSWER_SECONDS - 1 + 2 * IDLE_SECONDS)
    assert wire.aborted


def test_a_connection_has_the_idle_time_again_after_each_request(opened):
    protocol, wire, clock = opened
    for request in range(1, 6):
        clock.pass_until(request * IDLE_SECONDS * 0.9)
        answer(protocol, complete=True)
    assert not wire.aborted
    clock.pass_until(clock.now + 1.5 * IDLE_SECONDS)
    assert wire.aborted


def test_a_connection_that_ends_leaves_no_timer(opened):
    protocol, wire, clock = opened
    clock.pass_until(IDLE_SECONDS / 2)
    protocol.connection_lost(None)
    assert clock.timers == []
    clock.pass_until(9 * IDLE_SECONDS)
    assert not wire.aborted


def test_a_request_that_is_not_http_is_refused_with_the_policy_and_closed(opened):
    protocol, wire, _ = opened
    protocol.data_received(b"\x16\x03\x01\x02\x00\r\n\r\n")
    head, _, body = wire.written.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == "HTTP/1.1 400 Bad Request"
    assert HEADERS.items() <= headers.items()
    assert (headers["content-length"], headers["connection"]) == (str(len(body)), "close")
    assert json.loads(body) == {"error": "malformed HTTP request", "hint": "open the viewer in a browser"}
    assert wire.closed
