"""Connections: how long and how much the server listens before it hangs up."""

from __future__ import annotations

import json
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .auth import HEADER, HEADERS

SECONDS = 30  # an answer may take
PATIENCE = 10  # seconds a connection may stand without a whole request
CONNECTIONS = 256


def settings(app: ASGIApp) -> uvicorn.Config:
    """A server that logs no request, says nothing of itself, and bounds what it takes in."""
    return uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=PATIENCE,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=HEADER + 4096,
    )


class Impatient(H11Protocol):
    """HTTP where a connection that does not come to the point, or does not take its answer, is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_again(self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._hurry.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": "this is no request that can be read", "hint": "ask with a browser"})
        headers = {**HEADERS, "content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in headers.items()), "", body]
        self.transport.write("\r\n".join(lines).encode())
        self.transport.close()

    def _look_again(self, since: float) -> None:
        self._hurry = self.loop.call_later(PATIENCE / 4, self._look, since, self.cycle)

    def _look(self, since: float, before: object) -> None:
        now, answering = self.loop.time(), self.cycle is not None and not self.cycle.response_complete
        if self.cycle is not before:
            since = now
        if now - since > (2 * SECONDS if answering else PATIENCE):
            self.transport.abort()
        else:
            self._look_again(since)
