"""Authorization: middleware that checks every request before the application sees it.

Only a browser that was given a token may read, and only under a name of the viewer. A token works once: it is exchanged
for a cookie. The middleware wraps the whole application, so that no route can be reached without it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .host_names import HOST_NAME, HostNames

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
MAX_UNUSED_TOKENS = 64  # with more, the oldest stops working
# Redirects to the viewer from an address of its own, so that the browser sends the SameSite=Strict cookie.
WELCOME = (
    b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=./">'
    b'<link rel="icon" href="data:,"><title>regard</title>'
)
ERROR_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:18vh auto;"
    "padding:0 1rem}h1{font-size:1.2rem}"
)
ERROR_POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(ERROR_STYLE.encode()).digest()).decode()}'"
    "; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Embedding:
    """The frame of a notebook that shows the viewer: the path before ours in the browser, and whether sites differ.

    The viewer does not know the host name of a notebook server. It accepts each name that came with a valid token.
    """

    path: str = "/"
    cross_site: bool = False  # the notebook's page has another site than the frame


class TokenAuth:
    """Middleware that asks for a token; `host` is the viewer's address, and `allowed` are other names for it.

    The Host header must be one of them; see `HostNames`.
    """

    def __init__(
        self, app: ASGIApp, host: str, *, allowed: Sequence[str] = (), embedding: Embedding | None = None
    ) -> None:
        self.app, self.host, self._embedding = app, host, embedding
        port = host.rpartition(":")[2]
        self._session, self._cookie = secrets.token_urlsafe(32), f"regard-{port}"  # browsers send it to every port
        self._names = HostNames(host, allowed)
        self._unused: dict[str, Callable[[], None]] = {}
        self._used: list[str] = []
        self._printed = self.new_token()
        self._active_requests = 0
        self._headers = dict(HEADERS)
        if embedding is not None:
            ancestors = "" if embedding.cross_site else "; frame-ancestors 'self'"
            self._headers["content-security-policy"] = POLICY.replace("; frame-ancestors 'none'", ancestors)

    @property
    def token(self) -> str:
        """The token of the printed address; once a browser used it, another one."""
        if self._printed not in self._unused:
            self._printed = self.new_token()
        return self._printed

    def new_token(self, used: Callable[[], None] = lambda: None) -> str:
        """Make a token that works once; `used` is called when it does."""
        token = secrets.token_urlsafe(32)
        self._unused[token] = used
        while len(self._unused) > MAX_UNUSED_TOKENS:
            del self._unused[next(iter(self._unused))]
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = with_headers(send, self._headers)
        token, error = self._given_token(scope), self._find_error(scope)
        if error is not None:
            await answer(send, *error, page=_wants_page(scope))
        elif self._active_requests >= MAX_CONCURRENT_REQUESTS:
            await answer(send, 503, "too many requests at once", "try again in a moment", page=_wants_page(scope))
        elif token in self._unused:
            self._use(token, scope)
            await reply(send, 200, WELCOME, "text/html; charset=utf-8", {"set-cookie": self._set_cookie()})
        elif not self._has_cookie(scope):
            await answer(send, 401, *self._explain_401(token), page=_wants_page(scope))
        elif token:
            await reply(send, 200, WELCOME, "text/html; charset=utf-8")
        else:
            self._active_requests += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self._active_requests -= 1

    def _use(self, token: str, scope: Scope) -> None:
        used = self._unused.pop(token)
        self._used = [*self._used[-MAX_UNUSED_TOKENS:], token]
        if self._embedding is not None:
            self._names.add(header(scope, b"host"))
        used()

    def _set_cookie(self) -> str:
        embedding = self._embedding or Embedding()
        site = "SameSite=None; Secure; Partitioned" if embedding.cross_site else "SameSite=Strict"
        return f"{self._cookie}={self._session}; HttpOnly; {site}; Path={embedding.path}"

    def _explain_401(self, token: str) -> tuple[str, str]:
        """Return the error and hint for a request without a cookie and without a token that works."""
        if any(same(token, used) for used in self._used):
            hint = "each address works once: open the newer one that the terminal printed, or the one of viewer.url"
            return "this address was used already", hint
        return "not authorized", "open the address that the terminal or the notebook printed: it holds a token"

    def _find_error(self, scope: Scope) -> tuple[int, str, str] | None:
        """Return status, error and hint for a request that is refused even with the token, or None."""
        headers = scope["headers"]
        if not self._knows_host(scope):
            name = header(scope, b"host").decode("latin1").lower()
            shown = name if HOST_NAME.fullmatch(name) else "NAME"
            hint = f"open the address that the terminal printed, or start the viewer with --allow-host {shown}"
            return 403, "the Host header is not a name of the viewer", hint
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
        is_own_page = header(scope, b"sec-fetch-site") in (b"", b"same-origin", b"none")
        if self._given_token(scope) not in self._unused and not is_own_page:
            return 403, "the request came from another page", "open the address that the terminal printed in a new tab"
        return None

    def _knows_host(self, scope: Scope) -> bool:
        """Whether the one Host header is a name of the viewer."""
        if self._names.include(scope["headers"]):
            return True
        has_one = sum(name == b"host" for name, _ in scope["headers"]) == 1
        return has_one and self._embedding is not None and self._given_token(scope) in self._unused

    def _given_token(self, scope: Scope) -> str:
        """Return the unused token that the request carries, else the text in its place, "" if there is none."""
        if scope["path"] != "/" or not scope["query_string"]:
            return ""
        try:
            given = parse_qs(scope["query_string"].decode("ascii"), strict_parsing=True, max_num_fields=1)
        except ValueError:
            return ""
        text = given.get("token", [""])[0]
        return next((token for token in self._unused if same(text, token)), text)

    def _has_cookie(self, scope: Scope) -> bool:
        """Whether the request carries the session cookie."""
        pairs = [part.strip().partition("=") for part in header(scope, b"cookie").decode("latin1").split(";")]
        given = [value for name, _, value in pairs if name == self._cookie]
        return len(given) == 1 and same(given[0], self._session)


async def answer(send: Send, status: int, error: str, hint: str, *, page: bool = False) -> None:
    """Send an error as JSON, or as a small page for a reader."""
    more = {"allow": "GET"} if status == 405 else {}
    if page:
        body = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f'<link rel="icon" href="data:,"><title>regard: {html.escape(error)}</title><style>{ERROR_STYLE}</style>'
            f"<h1>{html.escape(_sentence(error))}</h1><p>{html.escape(_sentence(hint))}</p>"
        )
        more["content-security-policy"] = ERROR_POLICY
        await reply(send, status, body.encode(), "text/html; charset=utf-8", more)
    else:
        await reply(send, status, json.dumps({"error": error, "hint": hint}).encode(), "application/json", more)


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection beyond the limit: it says so and closes."""
    if scope["type"] == "http":
        body = json.dumps({"error": "too many connections at once", "hint": "close other tabs of the viewer"}).encode()
        await reply(with_headers(send, HEADERS), 503, body, "application/json", {"connection": "close"})


async def reply(send: Send, status: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
    """Send a complete response."""
    headers = {"content-type": kind, "content-length": str(len(body)), **(more or {})}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def with_headers(send: Send, headers: Mapping[str, str]) -> Callable[[Message], Awaitable[None]]:
    """Add the headers that the message does not have."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = list(message.get("headers", []))
            names = {name for name, _ in own}
            raw = [(name.encode(), value.encode()) for name, value in headers.items() if name.encode() not in names]
            message = {**message, "headers": [*own, *raw]}
        await send(message)

    return send_with_headers


def _wants_page(scope: Scope) -> bool:
    """Whether a browser opened an address, rather than the front end a resource."""
    return b"text/html" in header(scope, b"accept") and not scope["path"].startswith("/api/")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header; "" if it is missing, "?" if it occurs more than once."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else b"" if not found else b"?"


def same(given: str, secret: str) -> bool:
    """Compare with a secret, in a time that says nothing about it."""
    return hmac.compare_digest(given.encode("utf8", "replace"), secret.encode())
