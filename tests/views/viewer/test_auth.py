"""The gate: every request that is not from the page itself is turned away, whatever it asks for."""

import asyncio
import json
import re
import socket

import pytest

from regard.views.viewer.auth import (
    ERROR_POLICY,
    HEADERS,
    MAX_UNUSED_TOKENS,
    POLICY,
    WELCOME,
    Embedding,
    TokenAuth,
)
from regard.views.viewer.routes import RESOURCES
from regard.views.viewer.server import STATIC, Viewer

SESSION = "/api/session"


def sent(viewer, raw):
    """Status, head and body of whatever comes back for raw bytes; status 0 where nothing does."""
    host, _, port = viewer.auth.host.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=3) as peer:
        peer.sendall(raw)
        answer = b""
        try:
            while part := peer.recv(65536):
                answer += part
        except TimeoutError:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head, body


def request(path=SESSION, *, method="GET", host="HOST", cookie="COOKIE", more=()):
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += [f"Cookie: {cookie}"] if cookie is not None else []
    return "\r\n".join([*lines, "Connection: close", *more, "", ""])


HOSTILE = {
    # without the token, or with another
    "no cookie": request(cookie=None),
    "empty cookie": request(cookie=""),
    "cookie without value": request(cookie="NAME="),
    "another value": request(cookie="NAME=AAAA"),
    "one character short": request(cookie="SHORT"),
    "one character long": request(cookie="COOKIEx"),
    "the token as cookie": request(cookie="NAME=TOKEN"),
    "another name": request(cookie="regard=VALUE"),
    "name in capitals": request(cookie="UPPER"),
    "quoted": request(cookie='NAME="VALUE"'),
    "twice": request(cookie="COOKIE; COOKIE"),
    "two headers": request(cookie=None, more=["Cookie: COOKIE", "Cookie: COOKIE"]),
    "not ASCII": request(cookie="NAME=\u00e9\u00e9"),
    "in the query": request(f"{SESSION}?token=TOKEN", cookie=None),
    "bearer": request(cookie=None, more=["Authorization: Bearer TOKEN"]),
    "wrong token": request("/?token=AAAA", cookie=None),
    "empty token": request("/?token=", cookie=None),
    "token prefix": request("/?token=PREFIX", cookie=None),
    "token twice": request("/?token=TOKEN&token=TOKEN", cookie=None),
    "token and more": request("/?token=TOKEN&x=1", cookie=None),
    "token elsewhere": request("/app.js?token=TOKEN", cookie=None),
    "token in another place": request("/api/?token=TOKEN", cookie=None),
    # for another host
    "no host": request(host=None),
    "another host": request(host="example.com"),
    "another host with our port": request(host="example.com:PORT"),
    "localhost without port": request(host="localhost"),
    "localhost at another port": request(host="localhost:1"),
    "localhost and more": request(host="localhost:PORT.example.com"),
    "localhost under a name": request(host="localhost.example.com:PORT"),
    "markup in host": request(host="<script>:PORT"),
    "no port": request(host="127.0.0.1"),
    "another port": request(host="127.0.0.1:1"),
    "trailing dot": request(host="127.0.0.1.:PORT"),
    "user in host": request(host="x@HOST"),
    "host and more": request(host="HOST.example.com"),
    "host in decimal": request(host="2130706433:PORT"),
    "host in IPv6": request(host="[::1]:PORT"),
    "empty host": request(host=""),
    "two hosts": request(more=["Host: example.com"]),
    "forwarded host": request(host="example.com", more=["X-Forwarded-Host: HOST"]),
    "token for another host": request("/?token=TOKEN", host="example.com", cookie=None),
    # to do something
    **{method: request(method=method) for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")},
    "CONNECT": request("HOST", method="CONNECT"),
    "lower case method": request(method="get"),
    "made-up method": request(method="READ"),
    "method override": request(method="POST", more=["X-HTTP-Method-Override: GET"]),
    "preflight": request(method="OPTIONS", more=["Origin: http://example.com", "Access-Control-Request-Method: GET"]),
    "body": request(more=["Content-Length: 4"]) + "data",
    "chunked body": request(more=["Transfer-Encoding: chunked"]) + "4\r\ndata\r\n0\r\n\r\n",
    "two lengths": request(more=["Content-Length: 0", "Content-Length: 4"]) + "data",
    # from another page
    "cross-site": request(more=["Sec-Fetch-Site: cross-site"]),
    "another port's page": request(more=["Sec-Fetch-Site: same-site"]),
    "websocket": request(more=["Upgrade: websocket", "Sec-Fetch-Site: cross-site"]),
    # for what is not there
    "traversal": request("/../../etc/passwd"),
    "traversal in static": request("/app.js/../../../../etc/passwd"),
    "encoded traversal": request("/%2e%2e/%2e%2e/etc/passwd"),
    "encoded slash": request("/..%2f..%2fetc%2fpasswd"),
    "double encoding": request("/%252e%252e%252fetc/passwd"),
    "backslash": request("/..\\..\\etc\\passwd"),
    "double slash": request("//etc/passwd"),
    "null byte": request("/app.js%00.html"),
    "trailing slash": request("/app.js/"),
    "case": request("/APP.JS"),
    "source": request("/src/main.ts"),
    "unknown file": request("/favicon.ico"),
    "unknown resource": request("/api/file?path=/etc/passwd"),
    "resource below resource": request("/api/session/../session"),
    "absolute address": request("http://example.com/api/session"),
    "star": request("*", method="OPTIONS"),
    # that is no request
    "long address": request("/" + "a" * 5000),
    "long query": request(f"{SESSION}?{'a' * 3000}=1"),
    "long header": request(more=[f"X-Long: {'a' * 40000}"]),
    "many headers": request(more=[f"X-{n}: {'a' * 100}" for n in range(400)]),
    "no version": "GET /api/session\r\n\r\n",
    "version 9": f"GET {SESSION} HTTP/9.9\r\nHost: HOST\r\nCookie: COOKIE\r\nConnection: close\r\n\r\n",
    "noise": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "header without colon": request(more=["nonsense"]),
    "space before colon": request(more=["X : y"]),
    "folded header": request(more=["X: a\r\n b", "bad header : x"]),
    "line feed in path": request("/api/\nsession"),
}


@pytest.fixture
def filled(client, viewer):
    name, _, value = client.cookie.partition("=")
    token = viewer.auth.token
    words = {
        "COOKIE": client.cookie,
        "SHORT": client.cookie[:-1],
        "UPPER": f"{name.upper()}={value}",
        "NAME": name,
        "VALUE": value,
        "PREFIX": token[:-1],
        "TOKEN": token,
        "HOST": viewer.auth.host,
        "PORT": viewer.auth.host.rpartition(":")[2],
    }
    pattern = re.compile("|".join(words))
    return lambda raw: pattern.sub(lambda found: words[found[0]], raw).encode("utf8")


def test_there_are_enough_of_them():
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_requests_are_turned_away(viewer, filled, raw):
    status, head, body = sent(viewer, filled(raw))
    assert 400 <= status < 500
    text = (head + body).decode("latin1")
    assert "set-cookie" not in text.lower()
    assert "captures" not in text
    for secret in (viewer.auth.token, "Traceback", "uvicorn", "starlette", "/work", "site-packages", "root:"):
        assert secret not in text
    assert "access-control" not in text.lower()
    if not raw.startswith("HEAD"):
        assert json.loads(body).keys() == {"error", "hint"}


def test_the_same_request_is_let_in_when_nothing_is_wrong_with_it(viewer, filled):
    status, _, body = sent(viewer, filled(request()))
    assert status == 200
    assert b"captures" in body


def test_a_token_works_once(viewer, client):
    token = viewer.auth.token
    assert viewer.auth.token == token  # as long as no browser used it
    first, _ = client.ask(f"/?token={token}", cookie=None)
    again, body = client.ask(f"/?token={token}", cookie=None)
    assert (first.status, again.status) == (200, 401)
    assert "set-cookie" not in again.headers
    assert json.loads(body)["error"] == "this address was used already"
    assert viewer.auth.token != token
    assert client.ask(f"/?token={viewer.auth.token}", cookie=None)[0].status == 200
    with_cookie, body = client.ask(f"/?token={token}")  # the browser that used it, once more
    assert (with_cookie.status, body) == (200, WELCOME)


def test_the_oldest_of_many_unused_tokens_stops_working(viewer, client):
    first = viewer.auth.new_token()
    others = [viewer.auth.new_token() for _ in range(MAX_UNUSED_TOKENS)]
    assert client.ask(f"/?token={first}", cookie=None)[0].status == 401
    assert client.ask(f"/?token={others[0]}", cookie=None)[0].status == 200


def test_localhost_is_a_name_of_the_viewer(filled, viewer):
    for host in ("localhost:PORT", "LocalHoSt:PORT"):
        assert sent(viewer, filled(request(host=host)))[0] == 200


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("gpu7.example.org", "gpu7.example.org", 200),
        ("gpu7.example.org", "gpu7.example.org:8080", 200),
        ("GPU7.example.org", "gpu7.Example.org:8080", 200),
        ("gpu7.example.org:8080", "gpu7.example.org:8080", 200),
        ("localhost", "localhost:1", 200),
        ("[::1]", "[::1]:99", 200),
        ("gpu7.example.org:8080", "gpu7.example.org", 403),
        ("gpu7.example.org:8080", "gpu7.example.org:81", 403),
        ("gpu7.example.org", "gpu7.example.org.evil.com", 403),
        ("gpu7.example.org", "evil.com:gpu7.example.org", 403),
        ("gpu7.example.org", "evil.gpu7.example.org", 403),
        ("gpu7.example.org", "gpu7.example.org:", 403),
        ("gpu7.example.org", "gpu7.example.org:8080:1", 403),
        ("gpu7.example.org", "", 403),
    ],
)
def test_an_allowed_name_is_accepted_and_no_other(allowed, host, status):
    gate = TokenAuth(None, "127.0.0.1:8765", allowed=[allowed])
    assert opened_at(gate, host)["status"] == status
    assert opened_at(gate, "127.0.0.1:8765")["status"] == 200


@pytest.mark.parametrize(
    "name", ["", "*", "*.example.org", "http://example.org", "a b", "a/b", "example.org:x", "ü.de"]
)
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="an allowed host must be a name such as"):
        TokenAuth(None, "127.0.0.1:8765", allowed=[name])


def opened_at(gate, host, token=None, **more):
    """The start of the answer to a browser that opens an address with a token."""
    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/"}
    headers = [(b"host", host.encode()), *((name.encode(), value.encode()) for name, value in more.items())]
    query = f"token={token or gate.token}".encode()
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(gate({**scope, "headers": headers, "query_string": query}, None, send))
    return sent[0]


def header_of(message, name):
    return dict(message["headers"])[name].decode()


def test_the_name_by_which_a_notebook_came_with_its_token_is_accepted():
    gate = TokenAuth(None, "127.0.0.1:8765", embedding=Embedding("/user/ada/proxy/8765/"))
    assert opened_at(gate, "hub.example.org", token="wrong")["status"] == 403
    answer = opened_at(gate, "hub.example.org")
    assert answer["status"] == 200
    assert header_of(answer, b"set-cookie").endswith("HttpOnly; SameSite=Strict; Path=/user/ada/proxy/8765/")
    assert header_of(answer, b"content-security-policy") == POLICY.replace("ancestors 'none'", "ancestors 'self'")
    assert opened_at(gate, "hub.example.org", token="wrong")["status"] == 401
    assert opened_at(gate, "evil.example.org", token="wrong")["status"] == 403


def test_in_a_frame_of_another_site_the_cookie_is_for_that_frame_alone():
    gate = TokenAuth(None, "127.0.0.1:8765", embedding=Embedding(cross_site=True))
    answer = opened_at(gate, "localhost:8765")
    assert header_of(answer, b"set-cookie").endswith("HttpOnly; SameSite=None; Secure; Partitioned; Path=/")
    assert "frame-ancestors" not in header_of(answer, b"content-security-policy")


@pytest.mark.parametrize(
    ("path", "host", "cookie", "status", "words"),
    [
        ("/", "HOST", None, 401, "Not authorized|Open the address that the terminal or the notebook printed"),
        ("/?token=SPENT", "HOST", None, 401, "This address was used already|Each address works once"),
        ("/", "gpu7:PORT", "COOKIE", 403, "Host header is not a name of the viewer|with --allow-host gpu7:"),
        ("/", "<script>", "COOKIE", 403, "Host header is not a name of the viewer|with --allow-host NAME."),
    ],
)
def test_a_browser_gets_a_page_that_says_what_to_do(viewer, client, filled, path, host, cookie, status, words):
    spent = viewer.auth.token
    client.ask(f"/?token={spent}", cookie=None)
    more = ["Accept: text/html,application/xhtml+xml,*/*;q=0.8"]
    raw = request(path.replace("SPENT", spent), host=host, cookie=cookie, more=more)
    code, head, body = sent(viewer, filled(raw))
    assert code == status
    for part in words.split("|"):
        assert part in body.decode()
    assert b"content-type: text/html" in head.lower()
    for name, value in {**HEADERS, "content-security-policy": ERROR_POLICY}.items():
        assert f"{name}: {value}".encode() in head
    assert b"<script" not in body
    assert sent(viewer, filled(request(SESSION, host=host, cookie=cookie, more=more)))[2].startswith(b"{")


@pytest.mark.parametrize(
    ("printed", "host", "status"),
    [
        ("127.0.0.1:80", "127.0.0.1", 200),
        ("127.0.0.1:80", "127.0.0.1:80", 200),
        ("[::1]:80", "[::1]", 200),
        ("127.0.0.1:80", "127.0.0.1:8080", 403),
        ("127.0.0.1:8080", "127.0.0.1", 403),
    ],
)
def test_a_port_of_80_may_be_left_out_as_browsers_do(printed, host, status):
    assert opened_at(TokenAuth(None, printed), host)["status"] == status


@pytest.mark.parametrize("host", ["HOST", "example.com"])
def test_every_route_is_behind_the_gate(viewer, filled, host):
    routes = [route.path for route in viewer.auth.app.routes]
    assert sorted(routes) == sorted([*STATIC, *(f"/api/{name}" for name in RESOURCES)])
    for path in routes:
        cookie = None if host == "HOST" else "COOKIE"
        status, _, body = sent(viewer, filled(request(path, host=host, cookie=cookie)))
        assert status == (401 if host == "HOST" else 403)
        assert json.loads(body).keys() == {"error", "hint"}


def test_every_response_carries_the_policy(client):
    for path, cookie in (("/", "own"), ("/app.js", "own"), (SESSION, "own"), ("/nothing", "own"), ("/", None)):
        response, _ = client.ask(path, cookie=cookie)
        for name, value in HEADERS.items():
            assert response.headers[name] == value
        assert "access-control-allow-origin" not in response.headers
        assert "server" not in response.headers
    assert "'unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self';")


def test_the_token_becomes_a_strict_cookie(viewer, client):
    token = viewer.auth.token
    response, body = client.ask("/?token=" + token, cookie=None, headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status == 200
    attributes = [part.strip() for part in response.headers["set-cookie"].split(";")]
    assert attributes[1:] == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert token not in attributes[0]
    assert b"<script" not in body
    assert b'http-equiv="refresh" content="0; url=./"' in body
    assert len(viewer.auth.token) >= 43  # 256 bits
    other = Viewer([])
    other.close()
    assert other.auth.token != viewer.auth.token


def test_nothing_is_logged(viewer, client, capfd, logged):
    client.ask("/?token=" + viewer.auth.token, cookie=None)
    client.ask("/?token=wrong", cookie=None)
    client.ask("/api/session")
    assert "token" not in "".join((*(record.getMessage() for record in logged), *capfd.readouterr()))


def test_more_than_enough_at_once_is_answered_with_a_hint(viewer, client, monkeypatch):
    monkeypatch.setattr("regard.views.viewer.auth.MAX_CONCURRENT_REQUESTS", 0)
    response, body = client.ask(SESSION, cookie=client.cookie)
    assert response.status == 503
    assert json.loads(body)["hint"] == "try again in a moment"
