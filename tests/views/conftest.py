"""A capture of many kinds of attention, a viewer of it, a client that knows the way in, and a browser."""

import http.client
import json

import pytest
import torch

from regard import Alibi, Causal, Padding, SinkSoftmax, weights
from regard.lens import Tape
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.views.viewer.describe import Capture
from regard.views.viewer.server import Viewer
from regard.views.viewer.wire_format import parse_frame
from tests.views.browser import ARGUMENTS, CHROMIUM

SOURCE = ["<script>alert(1)</script>", "\u202eevil", "日本", "\x00", "🙂", "it", "##s", "'\"&", "."]
TARGET = ["le", "▁chat", "\ud800", "</title>", "fin"]
N, H = 9, 4


@pytest.fixture(scope="session")
def tape():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, H, N, 8)
    entries = {
        ("encoder.0", 0): weights(q, k, mask=Padding(torch.tensor([N, N - 2]))),
        ("encoder.1", 0): weights(k, q[:, :2], bias=Alibi(H)),
        ("decoder.0.own", 0): weights(q[:, :, :5], k[:, :, :5], mask=Causal(), normalize=SinkSoftmax(0.5)),
        ("decoder.0.cross", 0): weights(q[:, :, :5], k),
        ("measured", 0): Reduced(
            torch.Size((2, H, 60, 40)),
            {"entropy": TensorInMemory(torch.rand(2, H, 60)), "pool:8": TensorInMemory(torch.rand(2, H, 8, 8))},
        ),
    }
    tape = Tape(entries, facts={"model": "none"})
    padded = [*SOURCE[: N - 2], "[PAD]", "[PAD]"]
    tape.tokens = {"encoder.*": [SOURCE, padded], "decoder.*": TARGET, "*.cross": (TARGET, SOURCE)}
    tape.picture(torch.rand(3, 8, 8), patches=(2, 4), special=1, layers="encoder.0")
    return tape


class Client:
    """Asks as a browser does that was given the address."""

    def __init__(self, url):
        self.host, _, token = url.removeprefix("http://").partition("/")
        response, _ = self.ask(f"/{token}", cookie=None)
        self.cookie = response.headers["set-cookie"].partition(";")[0]

    def ask(self, path, cookie="own", method="GET", headers=None):
        connection = http.client.HTTPConnection(self.host, timeout=30)
        cookie = self.cookie if cookie == "own" else cookie
        connection.request(method, path, headers={**({"Cookie": cookie} if cookie else {}), **(headers or {})})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response, body

    def json(self, resource):
        response, body = self.ask(f"/api/{resource}")
        assert response.status == 200, body
        return json.loads(body)

    def frame(self, resource):
        response, body = self.ask(f"/api/{resource}")
        assert response.status == 200, body
        return parse_frame(body)


@pytest.fixture(scope="session")
def viewer(tape):
    with Viewer([Capture(tape, "first"), Capture(tape, "second")]) as viewer:
        yield viewer


@pytest.fixture
def client(viewer):
    return Client(viewer.url)


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium was found; install Debian's package chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
