"""The words of the viewer: captions, legends, help, and what a reader without a mouse or sharp eyes gets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from tests.views.browser import shown

pytestmark = pytest.mark.browser

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "sleeps"]
SOURCE, TARGET = ["the", "house", "is", "small", "."], ["das", "Haus", "ist", "sehr", "klein", "."]
VIEWS = ("overview", "map", "text", "lines", "flow", "images", "alignment")

CONTRASTS = """() => {
    const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const bytes = (colour, under) => {
        paper.fillStyle = under;
        paper.fillRect(0, 0, 1, 1);
        paper.fillStyle = colour;
        paper.fillRect(0, 0, 1, 1);
        return `rgb(${paper.getImageData(0, 0, 1, 1).data.slice(0, 3).join()})`;
    };
    const luminance = (colour) => {
        const part = (byte) => (byte <= 10 ? byte / 3295 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = colour.match(/\\d+/g).map(Number).map(part);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (one) => one
        ? bytes(getComputedStyle(one).backgroundColor, ground(one.parentElement))
        : "rgb(255,255,255)";
    return [...document.querySelectorAll("body *")].flatMap((one) => {
        const own = [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!own || !one.checkVisibility() || one.matches(":disabled, :disabled *, option, .unseen")) return [];
        const style = getComputedStyle(one), behind = ground(one);
        const ink = bytes(one instanceof SVGElement ? style.fill : style.color, behind);
        const [low, high] = [luminance(ink), luminance(behind)].sort((a, b) => a - b);
        return [[(high + 0.05) / (low + 0.05), one.className.baseVal ?? one.className, one.textContent.slice(0, 40)]];
    }).filter(([contrast]) => contrast < 4.5);
}"""


def many_kinds():
    """A capture for every view: self- and cross-attention of two texts of a batch, and a picture."""
    torch.manual_seed(0)
    entries = {(f"layers.{n}", 0): weights(*1.5 * torch.randn(2, 2, 4, len(WORDS), 8), mask=Causal()) for n in range(2)}
    entries["cross", 0] = weights(torch.randn(2, 4, len(TARGET), 8), 2 * torch.randn(2, 4, len(SOURCE), 8))
    entries["vit", 0] = weights(*torch.randn(2, 2, 4, 25, 8))
    tape = Tape(entries)
    tape.tokens = {"layers*": [WORDS, WORDS[::-1]], "cross": (TARGET, SOURCE)}
    tape.picture(torch.rand(40, 60, 3), patches=(4, 6), special=1, layers="vit")
    return tape


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_has_captions_a_legend_landmarks_and_contrast(chromium, scheme):
    with shown(chromium, many_kinds(), scheme=scheme) as watched:
        page = watched.page
        for view in VIEWS[1:]:
            watched.go(view=view, chosen="2,4", head=1)
            controls = page.locator(".bar .choice, .bar select")
            assert controls.count() >= 2
            for control in controls.all():
                caption = control.locator("xpath=..")
                assert caption.locator("> span").inner_text() == control.get_attribute("aria-label")
                assert caption.get_attribute("title").endswith(".")
            assert page.locator(".stage .legend-label:visible").first.inner_text(), view
            assert page.locator(".stage .legend .tick text").first.text_content() == "0"
            assert page.locator(".bar").evaluate("one => one.closest('header, nav, main, section[aria-label]')")
            assert page.evaluate(CONTRASTS) == [], view
        watched.go(view="text", chosen="2,4", head=1)
        assert page.locator("[data-control=text] option").all_inner_texts() == [
            "0: the quick brown fox jumps over …",
            "1: sleeps and dog lazy the over ju…",
        ]
        assert watched.text(".links .legend-label") == "mean weight from the chosen tokens to a word"
        watched.page.locator(".links .choice button", has_text="is seen by").click()
        watched.settle()
        assert watched.text(".links .legend-label") == "sum of the weights from a word to the chosen tokens"


def test_help_says_what_views_and_terms_are_beside_the_keys(chromium):
    with shown(chromium, many_kinds()) as watched:
        watched.press("?")
        dialog = watched.page.locator("dialog.help")
        assert dialog.locator(".view h4").evaluate_all("all => all.map(one => one.textContent)") == [*VIEWS, "compare"]
        assert all(text.count(".") == 2 for text in dialog.locator(".view p").all_inner_texts())
        assert dialog.locator(".view svg rect").count() > len(VIEWS)
        terms = dialog.locator(".terms dt").all_inner_texts()
        assert {"attention sink", "sqrt scale", "rollout"} <= set(terms)
        assert dialog.locator("kbd").count() > 20
        assert watched.page.evaluate(CONTRASTS) == []
        watched.press("?")
        assert not dialog.is_visible()


def test_a_pair_of_the_map_is_reached_zoomed_to_and_said_by_keys_alone(chromium):
    tape = many_kinds()
    A = tape["layers.1"].dense()[0, 2]
    with shown(chromium, tape) as watched:
        watched.go(view="map", layer=1, head=2)
        watched.press("ArrowDown", *["ArrowUp"] * 20, *["ArrowLeft"] * 20, *["ArrowDown"] * 6, *["ArrowRight"] * 3)
        said = watched.page.locator("output[aria-live]").inner_text()
        assert said.startswith("query the 6, key fox 3, ")
        assert float(said.split(", ")[2].replace("−", "-")) == pytest.approx(float(A[6, 3]), rel=1e-3)
        assert watched.page.locator(".card:visible .value").get_attribute("data-weight") is not None
        watched.press("Enter")
        assert watched.state["at"] == "6.5,3.5,8"
        watched.press("Enter")
        assert watched.state["chosen"] == "6,6"
        watched.press("Escape")
        assert watched.page.locator(".card:visible").count() == 0


def test_a_search_on_a_short_map_leaves_the_whole_of_it(chromium):
    with shown(chromium, many_kinds()) as watched:
        watched.go(view="map")
        watched.page.fill("input.search", "lazy")
        watched.page.press("input.search", "Enter")
        watched.settle()
        assert watched.state == {"view": "map", "chosen": "7,7", "find": "lazy"}


def test_neighbouring_heads_differ_in_lightness_and_not_by_hue_alone(chromium):
    with shown(chromium, many_kinds()) as watched:
        watched.go(view="lines")
        colours = watched.page.locator(".swatch i").evaluate_all("all => all.map(one => one.style.backgroundColor)")
        lightness = [float(colour.split("(")[1].split()[0]) for colour in colours]
        assert min(abs(a - b) for a, b in pairwise(lightness)) >= 0.08
