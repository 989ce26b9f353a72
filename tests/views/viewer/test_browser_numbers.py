"""What a reader sees in the viewer, cards, legends and CSV, beside the truth."""

from __future__ import annotations

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

BIG = ["the", "trophy", "does", "not", "fit", "it", "is", "too", "big", "."]
SMALL = [*BIG[:8], "small", "."]


def tape_of(*layers, tokens=None):
    tape = Tape({(f"layers.{n}", 0): A for n, A in enumerate(layers)})
    if tokens is not None:
        tape.tokens = tokens
    return tape


def causal_tape(tokens, *, seed=0, heads=2):
    torch.manual_seed(seed)
    return tape_of(weights(*1.5 * torch.randn(2, 1, heads, len(tokens), 8), mask=Causal()), tokens=tokens)


@pytest.mark.parametrize("offline", [False, True])
def test_each_panel_shows_the_words_of_its_own_capture(chromium, tmp_path, offline):
    one, other = causal_tape(BIG), causal_tape(SMALL, seed=1)
    one.page(other).save(tmp_path / "page.html")
    place = opened(chromium, (tmp_path / "page.html").as_uri()) if offline else shown(chromium, one, other)
    with place as watched:
        watched.go(view="map", against="capture", at="8.5,7.5,8")
        for panel, word in enumerate(["big", "small", "big | small"]):
            labels = watched.page.locator(".panel").nth(panel).locator(".axis.left .tick text").all_text_contents()
            assert {"too", word, "."} <= set(labels)
            assert not {"big", "small", "big | small"} - {word} & set(labels)
        watched.point()
        assert watched.text(".card dd >> nth=0").split() == ["big", "|", "small", "8"]
        header, *rows = watched.table()
        assert header[:3] == ["query", "query token of A", "query token of B"]
        assert ["8", "big", "small"] in [row[:3] for row in rows]
        assert all(a == b for n, a, b, *_ in rows if n != "8")
        a, b, difference = (header.index(f"{name}: mean weight") for name in ("A", "B", "A \u2212 B"))
        truth = [tape["layers.0"].dense()[0, 0] for tape in (one, other)]
        for row in rows:
            i, j = int(row[0]), int(row[3])
            assert [float(row[at]) for at in (a, b, difference)] == pytest.approx(
                [float(truth[0][i, j]), float(truth[1][i, j]), float(truth[0][i, j] - truth[1][i, j])], rel=1e-5
            )
