"""Who may ask a server."""

from __future__ import annotations

import socket

import pytest

from regard.serving.http_server import Server
from tests.serving.conftest import ask, shout


def test_the_token_opens_and_nothing_else_does(server):
    assert ask(server, {"text": "ah"}) == (200, {"answers": ["AH"]})
    for token in ("", "x" * len(server.token), server.token[:-1], server.token + "x"):
        status, found = ask(server, {"text": "ah"}, token=token)
        assert status == 401
        assert found["hint"] == "send the header Authorization: Bearer TOKEN"
    assert ask(server, {"text": "ah"}, Authorization=f"Basic {server.token}")[0] == 401


def test_the_host_must_be_a_name_of_the_server():
    with Server(shout(), "shouter", port=0, allow_host=["gpu7.example.org"]) as server:
        for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}", "gpu7.example.org:99"):
            assert ask(server, {"text": "ah"}, host=host)[0] == 200
        for host in ("evil.example", f"127.0.0.1:{server.port + 1}", "localhost"):
            assert ask(server, {"text": "ah"}, host=host)[0] == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(server, method):
    status, found = ask(server, {"text": "ah"}, method=method)
    assert status == 405
    assert "POST" in found["hint"]


def test_a_web_page_gets_nothing(server):
    assert ask(server, {"text": "ah"}, Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, {"text": "ah"}, Content_Type="text/plain")[0] == 415
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            f"OPTIONS /shout HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nOrigin: http://evil.example\r\n"
            "Access-Control-Request-Method: POST\r\n\r\n".encode()
        )
        head = client.recv(4096).lower()
    assert head.startswith(b"http/1.1 405")
    assert b"access-control" not in head


def test_long_addresses_and_headers_are_refused(server):
    assert ask(server, {"text": "ah"}, path="/shout?" + "x" * 2_001)[0] == 414
    assert ask(server, {"text": "ah"}, X="x" * 16_400)[0] == 431


def test_a_token_of_ones_own_must_be_long():
    with Server(shout(), "shouter", port=0, token="correct horse battery") as server:
        assert ask(server, {"text": "ah"}, token="correct horse battery")[0] == 200
    with pytest.raises(ValueError, match="at least 16"):
        Server(shout(), "shouter", port=0, token="short")
