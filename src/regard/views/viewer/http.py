"""HTTP connections: limits on their number, on idle time and on the size of a request."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .auth import HEADERS, MAX_HEADER_BYTES, too_many_connections

ANSWER_SECONDS = 30  # longest time for an answer
IDLE_SECONDS = 10  # longest time that a connection may wait without a complete request
MAX_CONNECTIONS = 256


def server_config(app: ASGIApp, protocol: type[TimeoutProtocol] | None = None) -> uvicorn.Config:
    """Return the settings of a server that logs no request, sends no server header and limits its input."""
    return uvicorn.Config(
        app,
        http=protocol or TimeoutProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES + 4096,
    )


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 that closes connections which send no complete request, or do not read the answer, in time."""

    answer_seconds: ClassVar[float] = ANSWER_SECONDS
    hint: ClassVar[str] = "open the viewer in a browser"  # for a malformed request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self.app = too_many_connections
        self._schedule_check(self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": "malformed HTTP request", "hint": self.hint})
        headers = {**HEADERS, "content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in headers.items()), "", body]
        self.transport.write("\r\n".join(lines).encode())
        self.transport.close()

    def _schedule_check(self, since: float) -> None:
        self._timer = self.loop.call_later(IDLE_SECONDS / 4, self._check_timeout, since, self._activity())

    def _check_timeout(self, since: float, before: tuple[object, bool]) -> None:
        now, activity = self.loop.time(), self._activity()
        if activity != before:
            since = now
        _, answering = activity
        if now - since > (2 * self.answer_seconds if answering else IDLE_SECONDS):
            self.transport.abort()
        else:
            self._schedule_check(since)

    def _activity(self) -> tuple[object, bool]:
        """Return the last request, and whether it is still being answered."""
        return self.cycle, self.cycle is not None and not self.cycle.response_complete
