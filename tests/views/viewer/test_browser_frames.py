"""The viewer in a real browser by other ways in: the redirect file, a proxy with a prefix, a frame of another site."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.views import view
from regard.views.viewer import server
from regard.views.viewer.browser_launch import remove_redirect, write_redirect
from regard.views.viewer.notebook import Notebook

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tape():
    torch.manual_seed(0)
    tape = Tape({("layers.0", 0): weights(*torch.randn(2, 1, 4, 6, 8), mask=Causal())})
    tape.tokens = list("abcdef")
    return tape


@contextmanager
def serving(answer):
    """A server whose `answer(path, headers)` gives status, headers and body; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = answer(self.path, self.headers)
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made.server_port
        made.shutdown()


@contextmanager
def page_of(chromium):
    context = chromium.new_context()
    yield context.new_page()
    context.close()


def test_the_redirect_file_opens_the_viewer(chromium, tape):
    with view(tape, open_browser=False) as viewer, page_of(chromium) as page:
        path = write_redirect(viewer.url)
        page.goto(path.as_uri())
        page.wait_for_selector("button.head")
        assert page.url.partition("#")[0] == f"http://{viewer.auth.host}/"
        remove_redirect(path)


def test_localhost_on_the_forwarded_port_opens_the_viewer(chromium, tape):
    with view(tape, open_browser=False) as viewer, page_of(chromium) as page:
        page.goto(viewer.url.replace("127.0.0.1", "localhost"))
        page.wait_for_selector("button.head")


@pytest.mark.parametrize("used", [False, True])
def test_an_address_without_a_token_that_works_is_a_page_that_says_what_to_do(chromium, tape, used):
    with view(tape, open_browser=False) as viewer:
        url = viewer.url
        for _ in range(1 + used):
            with page_of(chromium) as page:
                page.goto(url if used else url.partition("?")[0])
                page.wait_for_load_state()
                text, colours = page.inner_text("body"), page.evaluate("getComputedStyle(document.body).maxWidth")
        assert ("used already" if used else "Not authorized") in text
        assert "Traceback" not in text
        assert colours == "576px"  # its style is allowed by its policy


def in_notebook(monkeypatch, base):
    """Let the next viewers find themselves in a notebook with this address."""
    made = lambda port: Notebook(base.replace("{port}", str(port)), "")  # noqa: E731
    monkeypatch.setattr(server, "find_notebook", made)


def test_a_notebook_behind_a_proxy_with_a_prefix_shows_the_viewer(chromium, tape, monkeypatch):
    in_notebook(monkeypatch, "/user/ada/proxy/{port}/")
    state = SimpleNamespace(viewer=None)
    asked = []

    def hub(path, headers):
        prefix = f"/user/ada/proxy/{state.viewer.port}"
        if not path.startswith(prefix + "/"):
            asked.append(path)
            return 200, [("content-type", "text/html")], state.viewer._repr_html_().encode()
        request = urllib.request.Request(f"http://127.0.0.1:{state.viewer.port}{path.removeprefix(prefix)}")
        for name in ("Host", "Cookie", "Accept", "Sec-Fetch-Site"):
            if name in headers:
                request.add_header(name, headers[name])
        try:
            answer = urllib.request.urlopen(request, timeout=10)
        except urllib.error.HTTPError as error:
            answer = error
        skipped = ("transfer-encoding", "connection")
        return answer.status, [x for x in answer.headers.items() if x[0].lower() not in skipped], answer.read()

    with view(tape) as viewer, serving(hub) as port, page_of(chromium) as page:
        state.viewer = viewer
        page.goto(f"http://127.0.0.1:{port}/user/ada/lab")
        page.frame_locator("iframe").locator("button.head").nth(3).wait_for()
        assert [path for path in asked if "favicon" not in path] == ["/user/ada/lab"]
        (cookie,) = page.context.cookies()
        assert (cookie["path"], cookie["sameSite"]) == (f"/user/ada/proxy/{viewer.port}/", "Strict")


def test_a_frame_of_another_site_shows_the_viewer(chromium, tape, monkeypatch):
    in_notebook(monkeypatch, "http://127.0.0.1:{port}/")
    with view(tape) as viewer, page_of(chromium) as page:
        shown = viewer._repr_html_().encode()
        with serving(lambda path, headers: (200, [("content-type", "text/html")], shown)) as port:
            page.goto(f"http://localhost:{port}/lab")  # localhost and 127.0.0.1 are two sites
            page.frame_locator("iframe").locator("button.head").nth(3).wait_for()


def test_other_pages_may_not_frame_a_viewer_outside_of_notebooks(chromium, tape):
    with view(tape, open_browser=False) as viewer, page_of(chromium) as page:
        shown = f'<iframe src="{viewer.url}"></iframe>'.encode()
        with serving(lambda path, headers: (200, [("content-type", "text/html")], shown)) as port:
            page.goto(f"http://localhost:{port}/")
            page.wait_for_timeout(500)
            assert page.frame_locator("iframe").locator("button.head").count() == 0
