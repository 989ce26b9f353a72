"""An overview of many heads: drawn once, near the screen alone, and changed in parts."""

from __future__ import annotations

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.views import view
from tests.views.browser import opened

pytestmark = pytest.mark.browser

LAYERS, HEADS, N = 30, 12, 12
COUNT = """
    window.drawn = 0;
    const draw = CanvasRenderingContext2D.prototype.putImageData;
    CanvasRenderingContext2D.prototype.putImageData = function (...given) { drawn++; draw.apply(this, given); };
"""
NEAR = "[...document.querySelectorAll('button.head')].filter(one => one.querySelector('.thumb')).length"
THERE = """(count) => {
    const all = [...document.querySelectorAll("button.head")];
    const onScreen = all.filter((one) => {
        const { top, bottom, left } = one.getBoundingClientRect();
        return bottom > 110 && top < innerHeight && left < innerWidth;
    });
    return all.length === count && onScreen.length > 0 && onScreen.every((one) => one.querySelector(".thumb"));
}"""
CORNERS = """() => {
    const sheet = document.querySelector(".sheet canvas");
    const { left, top, width } = sheet.getBoundingClientRect();
    const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    [paper.canvas.width, paper.canvas.height] = [sheet.width, sheet.height];
    paper.drawImage(sheet, 0, 0);
    const pixels = new Uint32Array(paper.getImageData(0, 0, sheet.width, sheet.height).data.buffer);
    const at = (length) => Math.floor((length * sheet.width) / width);
    const colour = (x, y) => pixels[at(y - top) * sheet.width + at(x - left)];
    const found = [...document.querySelectorAll("button.head .thumb")].map((one) => one.getBoundingClientRect());
    const seen = found.filter(({ top, bottom, left }) => bottom > 110 && top < innerHeight && left < innerWidth);
    const pairs = seen.map(({ left, right, top }) => `${colour(left + 2, top + 2)} ${colour(right - 2, top + 2)}`);
    return [...new Set(pairs)];
}"""


@pytest.mark.parametrize("offline", [False, True])
def test_heads_are_drawn_once_while_they_are_near_the_screen(chromium, tmp_path, offline):
    torch.manual_seed(0)
    layers = {(f"layers.{n}", 0): weights(*torch.randn(2, 1, HEADS, N, 4), mask=Causal()) for n in range(LAYERS)}
    tape = Tape(layers)
    if offline:
        tape.page().save(tmp_path / "page.html")
        check((tmp_path / "page.html").as_uri(), chromium)
    else:
        with view(tape, open_browser=False) as viewer:
            check(viewer.url, chromium)


def check(url, chromium):
    with opened(chromium, url, script=COUNT) as watched:
        page = watched.page

        def drawn(count=LAYERS * HEADS, **state):
            """How many pictures are drawn until the heads on screen have theirs."""
            before = page.evaluate("drawn") if state else 0
            if state:
                watched.go(**state)
            watched.until(THERE, count)
            watched.settle()
            return page.evaluate("drawn") - before

        most = 0.6 * LAYERS * HEADS
        assert 0 < page.evaluate(NEAR) <= drawn() < most
        page.evaluate("document.querySelectorAll('button.head')[30].known = 1")
        [corners] = page.evaluate(CORNERS)  # of each map: the first token looks at itself, and not at the last one
        assert len(set(corners.split())) == 2
        assert 0 < drawn(scale="linear") < most
        assert 0 < drawn(scale="linear", palette="viridis") < most
        assert drawn(11 * HEADS, scale="linear", palette="viridis", filter="layers.1") < most  # 1, 10 to 19
        assert 0 < drawn(sort="entropy") < most
        assert page.locator("button.head .name").first.is_visible()
        assert len(page.evaluate(CORNERS)) == 1
        assert drawn(sort="layer") < most
        assert page.evaluate("document.querySelectorAll('button.head')[30].known") == 1  # moved, not made anew
        overviews = [one for one in watched.asked if "overview?" in one]
        assert len(overviews) == len(set(overviews)) <= LAYERS
        page.evaluate("document.querySelector('.stage').scrollTo(0, 1e6)")
        watched.until("[...document.querySelectorAll('button.head')].at(-1).querySelector('.thumb') !== null")
        assert page.evaluate("document.querySelector('button.head .thumb') !== null")
        assert page.evaluate("document.querySelector('button.head').querySelector('.thumb')") is None  # it has let go
        assert len(page.evaluate(CORNERS)) == 1
        page.focus("button.head >> nth=-12")
        watched.press("ArrowUp")
        focused = "[document.activeElement.dataset.layer, document.activeElement.dataset.head].map(Number)"
        assert page.evaluate(focused) == [LAYERS - 2, 0]
