"""Where a server listens."""

from __future__ import annotations

import socket

import pytest

from regard.views.viewer import sockets
from regard.views.viewer.sockets import open_socket


def port_of(port=None, host="127.0.0.1"):
    return open_socket(host, port, others="anyone can ask")


def test_the_port_is_the_default_or_the_next_free_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        first = free.getsockname()[1]
    monkeypatch.setattr(sockets, "PORT", first)
    with port_of() as one, port_of() as two:
        assert one.getsockname()[1] == first
        assert two.getsockname()[1] > first
        monkeypatch.setattr(sockets, "NEXT_PORTS", 1)  # none is left: any free port
        with port_of() as three:
            assert three.getsockname()[1] not in (first, two.getsockname()[1])
    with port_of(first) as again:
        assert again.getsockname()[1] == first


def test_a_port_that_is_taken_is_refused_by_name():
    with port_of(0) as taken, pytest.raises(OSError, match=r"cannot listen at 127\.0\.0\.1, port"):
        port_of(taken.getsockname()[1])


def test_the_default_port_is_8765():
    assert sockets.PORT == 8765


def test_other_machines_are_a_warning(monkeypatch):
    monkeypatch.setattr(sockets, "_listen", lambda host, port: None)
    with pytest.warns(UserWarning, match=r"other machines may reach 10\.0\.0\.7; anyone can ask"):
        port_of(0, host="10.0.0.7")


@pytest.mark.parametrize(("host", "port"), [("0.0.0.0", 0), ("", 0), ("127.0.0.1", 65536)])
def test_addresses_that_cannot_be_opened_are_refused(host, port):
    with pytest.raises(ValueError, match="must be"):
        port_of(port, host=host)
