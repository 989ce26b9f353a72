"""The socket of a server, on the loopback interface unless a host is given."""

from __future__ import annotations

import errno
import socket
import warnings
from ipaddress import ip_address

from .http import MAX_CONNECTIONS

LOOPBACK = "127.0.0.1"
PORT = 8765  # the default; if it is taken, one of the next ones
NEXT_PORTS = 100


def open_socket(host: str, port: int | None, *, others: str) -> socket.socket:
    """Listen at a port; None is the default one or, if that is taken, the next free one.

    `others` completes the warning about an address that other machines can reach.
    """
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"host must be a single address that clients can open, got {host!r}; write {LOOPBACK!r}")
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}; 0 chooses a free port")
    if not _is_loopback(host):
        warnings.warn(f"other machines may reach {host}; {others}", stacklevel=5)
    wanted = [*range(PORT, PORT + NEXT_PORTS), 0] if port is None else [port]
    for number in wanted:
        try:
            return _listen(host, number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or number == wanted[-1]:
                raise OSError(f"cannot listen at {host}, port {number}: {error.strerror}") from None
    raise AssertionError


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # with the protocol named, asyncio sets TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(MAX_CONNECTIONS)  # only now is the port taken for the next viewer
    except OSError:
        listener.close()
        raise
    return listener


def _is_loopback(host: str) -> bool:
    """Whether no other machine can reach this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
