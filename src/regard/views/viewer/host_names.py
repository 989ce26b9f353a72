"""HostNames: the names under which a server may be reached, so that no other site's name can lead a browser to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

HOST_NAME = re.compile(r"([a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")


class HostNames:
    """The server's address, `localhost` with its port, and allowed names: `name:port`, or `name` for every port.

    Port 80 may be left out.
    """

    def __init__(self, address: str, allowed: Sequence[str] = ()) -> None:
        names = address, f"localhost:{address.rpartition(':')[2]}"
        self._hosts = {name.lower().encode() for full in names for name in (full, full.removesuffix(":80"))}
        self._allowed = {_check_name(name).encode() for name in allowed}

    def add(self, name: bytes) -> None:
        """Allow one more name with its port."""
        self._hosts.add(name.lower())

    def include(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the one Host header among the headers of a request is a known name."""
        given = [value.lower() for name, value in headers if name == b"host"]
        if len(given) != 1:
            return False
        without_port = re.sub(rb":[0-9]{1,5}$", b"", given[0])
        return given[0] in self._hosts or bool({given[0], without_port} & self._allowed)


def _check_name(name: str) -> str:
    if not HOST_NAME.fullmatch(name.lower()):
        raise ValueError(f"an allowed host must be a name such as gpu7.example.org or localhost:8080, got {name!r}")
    return name.lower()
