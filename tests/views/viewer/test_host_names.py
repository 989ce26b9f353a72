"""Under which names a server may be reached."""

from __future__ import annotations

import pytest

from regard.views.viewer.host_names import HostNames


def includes(names, *hosts):
    return names.include([(b"accept", b"*/*"), *((b"host", host) for host in hosts)])


def test_the_address_and_localhost_are_known():
    names = HostNames("127.0.0.1:8765")
    assert includes(names, b"127.0.0.1:8765")
    assert includes(names, b"LOCALHOST:8765")
    assert not includes(names, b"127.0.0.1:80")
    assert not includes(names, b"127.0.0.1")
    assert not includes(names, b"evil.example:8765")


def test_exactly_one_host_is_asked_for():
    names = HostNames("127.0.0.1:8765")
    assert not includes(names)
    assert not includes(names, b"127.0.0.1:8765", b"127.0.0.1:8765")


def test_allowed_names_have_one_port_or_any():
    names = HostNames("127.0.0.1:8765", ["gpu7.example.org", "Proxy:8080"])
    assert includes(names, b"gpu7.example.org")
    assert includes(names, b"gpu7.example.org:99")
    assert includes(names, b"proxy:8080")
    assert not includes(names, b"proxy")
    assert not includes(names, b"proxy:8081")


def test_port_80_may_be_left_out():
    assert includes(HostNames("10.0.0.7:80"), b"10.0.0.7")


def test_a_name_can_be_added():
    names = HostNames("127.0.0.1:8765")
    names.add(b"Hub.example")
    assert includes(names, b"hub.example")


@pytest.mark.parametrize("name", ["http://gpu7", "a b", "-gpu7", "*", ""])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="an allowed host must be a name"):
        HostNames("127.0.0.1:8765", [name])
