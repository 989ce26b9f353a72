"""The gate: what every request passes before anything else is looked at.

Only a browser that was given the token gets in, only on the address that was printed, only to read. The gate stands
around the whole application, so that no route can be reached without it.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

URL = 2_000  # characters of a request's path and query
HEADER = 16_384  # bytes of a request's headers
AT_ONCE = 64  # requests being answered
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
# Goes on to the viewer from an address of its own, so that the strict cookie is sent along.
WELCOME = (
    b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/">'
    b'<link rel="icon" href="data:,"><title>regard</title>'
)


class Gate:
    """An application behind a token; `host` is the one value the Host header may have, less a port of 80."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app, self.host = app, host
        self.token, self._session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._cookie = f"regard-{host.rpartition(':')[2]}"  # a browser sends cookies to every port of a host
        self._hosts = [[name.encode()] for name in (host, host.removesuffix(":80"))]  # a browser leaves 80 out
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await answer(send, *refusal)
        elif self._inside >= AT_ONCE:
            await answer(send, 503, "too many requests at once", "ask again in a moment")
        elif self._is_welcome(scope):
            cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
            await reply(send, 200, WELCOME, "text/html; charset=utf-8", {"set-cookie": cookie})
        elif not self._is_known(scope):
            await answer(send, 401, "this page does not know you", "open the address that was printed")
        else:
            self._inside += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self._inside -= 1

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """What speaks against a request whoever sent it."""
        headers = scope["headers"]
        if [value for name, value in headers if name == b"host"] not in self._hosts:
            return 403, "this is not the address of the viewer", "open the address that was printed"
        if scope["http_version"] not in ("1.0", "1.1"):
            return 400, "this is no request that can be read", "ask with a browser"
        if scope["method"] != "GET":
            return 405, "the viewer only reads", "ask with GET"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > URL:
            return 414, f"an address has at most {URL} characters", "ask for less"
        if sum(len(name) + len(value) for name, value in headers) > HEADER:
            return 431, f"headers have at most {HEADER} bytes", "send fewer"
        length = [value for name, value in headers if name == b"content-length"]
        if length not in ([], [b"0"]) or any(name == b"transfer-encoding" for name, _ in headers):
            return 413, "a question has no body", "send none"
        if not self._is_welcome(scope) and _header(scope, b"sec-fetch-site") not in (b"", b"same-origin", b"none"):
            return 403, "another page asked", "open the address that was printed"
        return None

    def _is_welcome(self, scope: Scope) -> bool:
        """Does the request bring the token?"""
        if scope["path"] != "/" or not scope["query_string"]:
            return False
        try:
            given = parse_qs(scope["query_string"].decode("ascii"), strict_parsing=True, max_num_fields=1)
        except ValueError:
            return False
        return _same(given.get("token", [""])[0], self.token)

    def _is_known(self, scope: Scope) -> bool:
        """Does the request bring the cookie?"""
        pairs = [part.strip().partition("=") for part in _header(scope, b"cookie").decode("latin1").split(";")]
        given = [value for name, _, value in pairs if name == self._cookie]
        return len(given) == 1 and _same(given[0], self._session)


async def answer(send: Send, status: int, error: str, hint: str) -> None:
    """An error as JSON."""
    body = json.dumps({"error": error, "hint": hint}).encode()
    await reply(send, status, body, "application/json", {"allow": "GET"} if status == 405 else {})


async def reply(send: Send, status: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
    """A whole response."""
    headers = {"content-type": kind, "content-length": str(len(body)), **(more or {})}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            raw = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *raw]}
        await send(message)

    return wrapped


def _header(scope: Scope, name: bytes) -> bytes:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else b"" if not found else b"?"


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf8", "replace"), secret.encode())
