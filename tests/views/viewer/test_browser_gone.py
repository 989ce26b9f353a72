"""The viewer in a real browser, of tokens of any length, and without its server: it says so, and no map is blank."""

from __future__ import annotations

import time

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.views import view
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

GONE = "The viewer's server does not answer."


@pytest.fixture(scope="module")
def tape():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 300, 8)
    tape = Tape({(f"layers.{n}", 0): weights(q, k, mask=Causal()) for n in range(2)})
    tape.tokens = [f"w{n}" for n in range(300)]
    return tape


def gone(watched):
    """Forget the failed requests, which the browser reports by itself; anything else stays wrong."""
    # OpenSeadragon reports its tiles too; a server that is closing answers 503.
    expected = ("ERR_CONNECTION_REFUSED", "failed to load", "status of 503")
    watched.wrong[:] = [text for text in watched.wrong if not any(part in text for part in expected)]
    assert watched.wrong == []


@pytest.mark.parametrize(
    "change", [{"head": 1}, {"layer": 1}, {"view": "text", "chosen": "5,5"}, {"against": "head.1"}]
)
def test_a_map_whose_server_is_gone_is_words_and_no_blank_picture(chromium, tape, change):
    with view(tape, open_browser=False) as viewer, opened(chromium, viewer.url) as watched:
        watched.go(view="map")
        viewer.close()
        watched.go(**{"view": "map", **change})
        watched.page.wait_for_selector(".notice")
        watched.page.wait_for_timeout(300)  # colours are fitted 60 ms after the last change, and drew over it
        assert GONE in watched.text(".notice")
        assert watched.page.locator(".legend:visible").count() == 0
        assert watched.page.locator(".panel .deep").count() == 0
        gone(watched)


def test_a_zoom_whose_weights_cannot_come_says_so(chromium):
    tape = Tape({("layers.0", 0): weights(*torch.randn(2, 1, 1, 1500, 8), mask=Causal())})
    tape.tokens = [f"w{n}" for n in range(1500)]
    with view(tape, open_browser=False) as viewer, opened(chromium, viewer.url) as watched:
        watched.go(view="map")
        viewer.close()
        watched.go(view="map", at="40,40,8")  # zoomed to weights that were never fetched
        watched.page.wait_for_timeout(500)
        assert GONE in watched.text("main .notice")
        watched.page.fill(".find input", "w7")
        watched.press("Enter")
        watched.page.wait_for_timeout(200)
        gone(watched)


def test_a_map_comes_back_with_its_server(chromium, tape):
    with view(tape, open_browser=False) as viewer:
        port = viewer.port
        with opened(chromium, viewer.url) as watched:
            watched.go(view="map")
            watched.page.route("**/api/tile*", lambda route: route.abort("connectionrefused"))
            watched.go(view="map", head=1)
            watched.page.wait_for_selector(".notice")
            watched.page.wait_for_timeout(200)
            watched.page.unroute("**/api/tile*")
            watched.go(view="map", head=2)
            assert watched.page.locator(".panel .deep").count() == 1
            assert watched.page.locator(".legend:visible").count() == 1
            assert not watched.page.locator(".notice").count()
            gone(watched)
        assert viewer.port == port


def test_a_token_of_a_megabyte_is_cut_and_says_so(chromium):
    torch.manual_seed(0)
    tape = Tape({("layers.0", 0): weights(*torch.randn(2, 1, 2, 4, 8), mask=Causal())})
    tape.tokens = ["one", "x" * 999 + "🙂" * 500_000, "y" * 399 + "🙂z", "four"]
    with shown(chromium, tape) as watched:
        start = time.monotonic()
        watched.go(view="text", chosen="1,1")
        assert time.monotonic() - start < 15
        assert "… 1,000,599 more characters" in watched.text('.tok[data-n="1"]')
        assert len(watched.text('.tok[data-n="1"]')) < 500
        assert "… 3 more characters" in watched.text('.tok[data-n="2"]')  # no half of a pair of surrogates
        assert "\ufffd" not in watched.text('.tok[data-n="2"]')
        assert "x" in watched.text("aside.links h2")
        watched.go(view="map", chosen="1,1")


def test_a_page_says_what_it_holds(chromium, tape, tmp_path):
    tape.page(layers=[1], heads=[0, 2]).save(tmp_path / "page.html")
    with opened(chromium, (tmp_path / "page.html").as_uri()) as watched:
        assert watched.text(".holds").startswith("This page holds 1 of 2 layers, heads 0, 2 alone")
        assert watched.page.locator("button.head").count() == 2
    with shown(chromium, tape) as watched:
        assert not watched.page.locator(".holds").count()
