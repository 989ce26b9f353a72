"""The viewer in a real browser, of captures that are long, faint, empty, repeated or hold what is no number."""

import math

import numpy as np
import pytest
import torch

from regard import Causal, Dot, weights
from regard.lens import Tape, capture, rollout
from regard.views import page
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

NO_NUMBER = (159, 180, 192)  # as `regard.views.figures.canvas` draws it


def both(chromium, tape, path):
    """The tape live, then as a page."""
    with shown(chromium, tape) as watched:
        yield watched
    tape.page().save(path)
    with opened(chromium, path.as_uri()) as watched:
        yield watched


def shared_layer():
    """One layer, gone through three times."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with capture(layer, list("abcdef")) as tape, torch.no_grad():
        x = 2 * torch.randn(1, 6, 16)
        for _ in range(3):
            x = layer(x)
    return tape


def two_passes():
    """An encoder of two layers, asked twice."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 2).eval()
    with capture(model, list("abcdef")) as tape, torch.no_grad():
        for _ in range(2):
            model(2 * torch.randn(1, 6, 16))
    return tape


def strip(watched):
    """The pixels of the flow, the token on top."""
    script = """one => {
        const { data } = one.getContext("2d").getImageData(0, 0, one.width, one.height);
        return [one.height, one.width, ...data];
    }"""
    rows, cols, *data = watched.page.locator(".strip > canvas").evaluate(script)
    return np.array(data).reshape(rows, cols, 4)[..., :3]


@pytest.mark.parametrize(
    ("make", "layer", "stack"), [(shared_layer, 0, [0, 1, 2]), (two_passes, 0, [0, 1]), (two_passes, 2, [2, 3])]
)
def test_flow_is_the_same_live_and_as_a_page(chromium, tmp_path, make, layer, stack):
    torch.manual_seed(0)
    tape = make()
    keys = list(tape)
    wanted = rollout([tape[keys[n]] for n in stack], token=5)[0]
    for watched in both(chromium, tape, tmp_path / "page.html"):
        watched.go(view="flow", layer=layer)
        ends, found = watched.links(".flow aside")
        assert sorted(ends) == list(range(6))
        assert found == pytest.approx(wanted[ends].tolist(), rel=0.03)
        assert len({row[0] for row in watched.table()[1:]}) == len(stack) + 1


def test_flow_shows_what_is_no_number_live_and_as_a_page(chromium, tmp_path):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 6, 8)
    q[..., 5, :] = torch.nan
    tape = Tape({("a", 0): weights(k, k), ("b", 0): weights(q, k)})
    for watched in both(chromium, tape, tmp_path / "page.html"):
        watched.go(view="flow", chosen="5,5")
        pixels = strip(watched)
        assert pixels.shape == (3, 6, 3)
        assert (pixels[1:] == NO_NUMBER).all()
        assert not (pixels[0] == NO_NUMBER).all(-1).any()


def test_the_strip_of_a_long_text_draws_the_token_and_what_it_comes_from(chromium):
    torch.manual_seed(0)
    n, token, far = 3001, 2900, 1237
    q, k = torch.zeros(1, 1, n, 4), torch.zeros(1, 1, n, 4)
    q[..., 0], k[..., far, 0] = 1.0, 40.0
    with shown(chromium, Tape({("a", 0): weights(q, k, mask=Causal())})) as watched:
        watched.go(view="flow", chosen=f"{token},{token}")
        pixels = strip(watched).sum(-1)
        across = pixels.shape[1]
        assert across <= watched.page.locator(".strip > canvas").bounding_box()["width"]
        drawn = [np.flatnonzero(row < row.max() - 100).tolist() for row in pixels]
        assert drawn == [[token * across // n], [far * across // n, token * across // n]]


def test_one_query_that_is_no_number_leaves_the_others_ranked(chromium, tmp_path):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 8)
    q[..., 2, :] = torch.nan
    tape = Tape({("a", 0): weights(q, k)})
    best = tape["a"].dense()[0, 0, :, 1].nan_to_num(-1).argsort(descending=True)[:5].tolist()
    for watched in both(chromium, tape, tmp_path / "page.html"):
        watched.go(view="text", chosen="1,1", axis="key")
        assert watched.links("section[data-side=key]")[0] == best
        fills = watched.page.locator(".tok").evaluate_all(
            "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )
        assert len({fills[n] for n in best}) == 5
        assert fills[2] not in {fills[n] for n in best}


def test_lines_of_even_attention_are_drawn_and_their_scale_is_said(chromium):
    n = 128
    with shown(chromium, Tape({("a", 0): weights(torch.zeros(1, 1, n, 4), torch.zeros(1, 1, n, 4))})) as watched:
        watched.go(view="lines", window="0,0,16")
        assert watched.page.locator("path.link").count() == 16 * 16
        strongest, given = watched.text(".lines .scale").split("; ")
        assert float(strongest.rpartition(" ")[2]) == pytest.approx(1 / n, rel=1e-2)
        assert given == "88 % of what these queries give goes to keys outside of this window"
        watched.go(view="lines", lines="model")
        assert len(watched.colours(".lines canvas")) > 1


def test_weights_are_said_as_exactly_as_a_page_knows_them(chromium, tmp_path, monkeypatch):
    q = torch.diag(torch.full((6,), 2 * math.log(5 * 0.974 / 0.026)))[None, None]  # each token gives itself 0.974
    tape = Tape({("a", 0): weights(q, torch.eye(6)[None, None], score=Dot(scale=0.5))})
    path = tmp_path / "page.html"

    def said(watched):
        watched.go(view="lines")
        lines = watched.text(".lines .scale")
        watched.go(view="text", chosen="1,1")
        listed = watched.text(".text aside")
        watched.go(view="flow", chosen="1,1")
        return lines, "to within 3 %" in listed, "to within 3 %" in watched.text(".flow header")

    for watched in both(chromium, tape, path):
        lines, *warned = said(watched)
        assert lines == "the strongest line is a weight of 0.974"
        assert warned == [False, False]
    monkeypatch.setitem(page.__globals__, "MAX_FLOAT_CELLS", 0)
    tape.page().save(path)
    with opened(chromium, path.as_uri()) as watched:
        assert said(watched) == ("the strongest line is a weight of 1 to within 3 %", True, True)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_a_layer_without_anything_says_so_in_every_view(chromium, tmp_path, empty):
    q, k = torch.randn(2, 1, 2, 5, 8)
    none = {"batch": (q[:0], k[:0]), "queries": (q[:, :, :0], k), "keys": (q, k[:, :, :0])}[empty]
    tape = Tape({("none", 0): weights(*none), ("some", 0): weights(q, k)})
    for watched in both(chromium, tape, tmp_path / "page.html"):
        assert watched.page.locator("button.head").count() == 2
        for name in ("map", "text", "lines"):
            watched.go(view=name, layer=0)
            assert watched.page.locator(".stage > *").all_inner_texts() == ["This layer has nothing to show."]
            watched.press("}")
            assert watched.state == {"view": name, "layer": "1"}
            assert watched.page.locator(".stage .notice").count() == 0
            watched.press("{")
            assert watched.state == {"view": name}
            assert watched.page.locator(".stage .notice").count() == 1


def test_a_capture_without_anything_says_so(chromium):
    with shown(chromium, Tape({("none", 0): weights(*torch.randn(2, 0, 2, 5, 8))})) as watched:
        assert watched.text(".overview .notice") == "No layer has anything to show."


@pytest.mark.parametrize("view", ["flow", "text"])
def test_words_can_be_read_in_a_narrow_window(chromium, view):
    with shown(chromium, two_passes().select("*.0.*")) as watched:
        watched.page.set_viewport_size({"width": 900, "height": 700})
        watched.go(view=view, chosen="3,3")
        words = watched.page.locator("aside li .token").all()
        assert words
        assert all(word.bounding_box()["width"] > 50 for word in words)


def test_what_the_toolbar_says_is_not_cut(chromium):
    layers = ("encoder.layers.0.self_attn", "decoder.layers.11.encoder_attn")
    tape = Tape({(layer, 0): weights(*torch.randn(2, 1, 2, 6, 8)) for layer in layers})
    with shown(chromium, tape) as watched:
        written = """one => {
            const paper = document.createElement("canvas").getContext("2d");
            paper.font = getComputedStyle(one).font;
            return paper.measureText(one.placeholder ?? one.selectedOptions[0].text).width;
        }"""
        room = "one => one.clientWidth - 2 * parseFloat(getComputedStyle(one).paddingLeft)"
        for view, name in (("overview", "filter"), ("map", "layer")):
            watched.go(view=view, layer=1)
            field = watched.page.locator(f"[data-control={name}]")
            assert field.evaluate(written) < field.evaluate(room)
