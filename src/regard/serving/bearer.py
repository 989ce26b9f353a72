"""Authorization of a server for programs: who may ask, and what may reach the application.

A request for answers carries the token as `Authorization: Bearer TOKEN`. The API page and the health check need none:
they hold no answer. Web pages get nothing, because no response allows another origin.
"""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from ..views.viewer.auth import HEADERS, MAX_HEADER_BYTES, MAX_URL_CHARACTERS, answer, header, same, with_headers
from ..views.viewer.host_names import HostNames

MIN_TOKEN_CHARACTERS = 16


def make_token() -> str:
    """Return a new token."""
    return secrets.token_urlsafe(32)


def check_token(token: str) -> str:
    """Return a token of the user; raise if it is short, or cannot be sent in a header."""
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ValueError(f"the token must be at least {MIN_TOKEN_CHARACTERS} printable ASCII characters")
    return token


class BearerAuth:
    """Middleware that asks each POST for the token; GET is free."""

    def __init__(self, app: ASGIApp, names: HostNames, token: str) -> None:
        self.app, self.names, self.token = app, names, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = with_headers(send, HEADERS)
        error = self._find_error(scope)
        if error is None:
            await self.app(scope, receive, send)
        else:
            await answer(send, *error)

    def _find_error(self, scope: Scope) -> tuple[int, str, str] | None:
        """Return status, error and hint for a request that is refused, or None."""
        headers = scope["headers"]
        if not self.names.include(headers):
            return 403, "the Host header is not a name of the server", "start it with --allow-host NAME"
        if scope["http_version"] not in ("1.0", "1.1"):
            return 400, "the server speaks HTTP/1.0 and HTTP/1.1 only", "use one of them"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL_CHARACTERS:
            return 414, f"the URL is longer than {MAX_URL_CHARACTERS} characters", "send a shorter one"
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            return 431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "send fewer"
        if scope["method"] == "GET":
            return None
        if scope["method"] != "POST":
            return 405, f"{scope['method']} is not supported", "send POST for answers, or GET / for the API"
        if header(scope, b"sec-fetch-site") not in (b"", b"none"):
            return 403, "the request came from a web page", "ask from a program of your own"
        kind, _, given = header(scope, b"authorization").decode("latin1").partition(" ")
        if kind.lower() != "bearer" or not same(given.strip(), self.token):
            return 401, "the token is missing or wrong", "send the header Authorization: Bearer TOKEN"
        return None
