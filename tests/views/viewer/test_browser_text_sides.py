"""The two sides of a token in the text: each as soon as it is there, and padding in neither."""

from __future__ import annotations

import pytest
import torch

from regard import Causal, Padding, weights
from regard.lens import Tape
from regard.views import page
from regard.views.viewer import api, captures
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser


def test_a_row_is_shown_where_what_a_token_receives_takes_too_long(chromium, monkeypatch):
    torch.manual_seed(0)
    tape = Tape({("layer", 0): weights(*torch.randn(2, 1, 1, 1200, 8), mask=Causal())})
    tape.tokens = [f"w{i}" for i in range(1200)]
    for module in (api, captures):
        monkeypatch.setattr(module, "MAX_IMMEDIATE_WEIGHTS", 1000)
        monkeypatch.setattr(module, "MAX_BACKGROUND_WEIGHTS", 0)
    with shown(chromium, tape) as watched:
        watched.go(view="text", chosen="1100,1100")
        ends, _ = watched.links("section[data-side=query]")
        assert ends == tape["layer"].dense()[0, 0, 1100].argsort(descending=True)[: len(ends)].tolist()
        assert watched.text("section[data-side=key] p") == (
            "The capture has no summary, and without one this takes too long. "
            "Capture it with regard look --summarize, or call tape.summarize() before tape.save(...)."
        )
        box = watched.page.locator('.tok[data-n="1100"]').bounding_box()
        assert 100 < box["y"] < 800
        refused = "Failed to load resource: the server responded with a status of 409 (Conflict)"
        assert set(watched.wrong) == {refused}  # the overview before asked for the roles of heads too
        watched.wrong.clear()


@pytest.mark.parametrize("kind", ["live", "weights", "links"])
def test_a_span_is_averaged_without_its_padding(chromium, tmp_path, monkeypatch, kind):
    torch.manual_seed(0)
    n, real = 40, 25
    tape = Tape({("layer", 0): weights(*torch.randn(2, 1, 1, n, 8), mask=Padding((real,)))})
    if kind == "links":
        monkeypatch.setitem(page.__globals__, "MAX_CELLS", 500)
    tape.page().save(tmp_path / "page.html")
    truth = tape["layer"].dense()[0, 0, 20:real].mean(0)
    place = shown(chromium, tape) if kind == "live" else opened(chromium, (tmp_path / "page.html").as_uri())
    with place as watched:
        watched.go(view="text", chosen=f"20,{n - 1}")
        assert watched.text("section[data-side=query] h3") == f"looks at, mean of {real - 20} queries"
        assert watched.text("section[data-side=key] h3") == f"is seen by, sum over {real - 20} keys"
        ends, found = watched.links("section[data-side=query]") if kind != "links" else ([], [])
        assert found == pytest.approx(truth[ends].tolist(), rel=0.06)
        for side, position, _, weight, *_ in watched.table()[1:]:
            if side == "looks at" and kind == "links":  # at least so much, and not far below
                assert 0.3 * float(truth[int(position)]) < float(weight) <= 1.03 * float(truth[int(position)])
            elif side == "looks at":
                assert float(weight) == pytest.approx(float(truth[int(position)]), rel=0.06)
