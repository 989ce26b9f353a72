"""Authorization: middleware that checks every request before the application sees it.

Only a browser that was given the token may read, and only at the printed address. The middleware wraps the whole
application, so that no route can be reached without it.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_URL_CHARACTERS = 2_000  # path and query of a request
MAX_HEADER_BYTES = 16_384  # all headers of a request
MAX_CONCURRENT_REQUESTS = 64
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
# Redirects to the viewer from an address of its own, so that the browser sends the SameSite=Strict cookie.
WELCOME = (
    b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/">'
    b'<link rel="icon" href="data:,"><title>regard</title>'
)


class TokenAuth:
    """Middleware that asks for a token; `host` is the only Host header it accepts, without the port if that is 80."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app, self.host = app, host
        self.token, self._session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._cookie = f"regard-{host.rpartition(':')[2]}"  # a browser sends cookies to every port of a host
        self._hosts = [[name.encode()] for name in (host, host.removesuffix(":80"))]  # browsers omit port 80
        self._active_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        error = self._find_error(scope)
        if error is not None:
            await answer(send, *error)
        elif self._active_requests >= MAX_CONCURRENT_REQUESTS:
            await answer(send, 503, "too many requests at once", "try again in a moment")
        elif self._has_token(scope):
            cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
            await reply(send, 200, WELCOME, "text/html; charset=utf-8", {"set-cookie": cookie})
        elif not self._has_cookie(scope):
            await answer(send, 401, "not authorized", "open the URL printed in the terminal (it contains the token)")
        else:
            self._active_requests += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self._active_requests -= 1

    def _find_error(self, scope: Scope) -> tuple[int, str, str] | None:
        """Return status, error and hint for a request that is refused even with the token, or None."""
        headers = scope["headers"]
        if [value for name, value in headers if name == b"host"] not in self._hosts:
            return 403, "the Host header is not the address of the viewer", "open the URL printed in the terminal"
        if scope["http_version"] not in ("1.0", "1.1"):
            return 400, "the viewer speaks HTTP/1.0 and HTTP/1.1 only", "open it in a browser"
        if scope["method"] != "GET":
            return 405, "the viewer is read-only", "send GET requests"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL_CHARACTERS:
            return 414, f"the URL is longer than {MAX_URL_CHARACTERS} characters", "send a shorter one"
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            return 431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "send fewer"
        length = [value for name, value in headers if name == b"content-length"]
        if length not in ([], [b"0"]) or any(name == b"transfer-encoding" for name, _ in headers):
            return 413, "requests must have no body", "send none"
        if not self._has_token(scope) and _header(scope, b"sec-fetch-site") not in (b"", b"same-origin", b"none"):
            return 403, "the request came from another page", "open the URL printed in the terminal"
        return None

    def _has_token(self, scope: Scope) -> bool:
        """Whether the request carries the token."""
        if scope["path"] != "/" or not scope["query_string"]:
            return False
        try:
            given = parse_qs(scope["query_string"].decode("ascii"), strict_parsing=True, max_num_fields=1)
        except ValueError:
            return False
        return _same(given.get("token", [""])[0], self.token)

    def _has_cookie(self, scope: Scope) -> bool:
        """Whether the request carries the session cookie."""
        pairs = [part.strip().partition("=") for part in _header(scope, b"cookie").decode("latin1").split(";")]
        given = [value for name, _, value in pairs if name == self._cookie]
        return len(given) == 1 and _same(given[0], self._session)


async def answer(send: Send, status: int, error: str, hint: str) -> None:
    """Send an error as JSON."""
    body = json.dumps({"error": error, "hint": hint}).encode()
    await reply(send, status, body, "application/json", {"allow": "GET"} if status == 405 else {})


async def reply(send: Send, status: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
    """Send a complete response."""
    headers = {"content-type": kind, "content-length": str(len(body)), **(more or {})}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            raw = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *raw]}
        await send(message)

    return send_with_headers


def _header(scope: Scope, name: bytes) -> bytes:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else b"" if not found else b"?"


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf8", "replace"), secret.encode())
