"""What a reader sees in the viewer, cards, legends and CSV, beside the truth."""

from __future__ import annotations

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.views.viewer import captures
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

BIG = ["the", "trophy", "does", "not", "fit", "it", "is", "too", "big", "."]
NO_NUMBER = (159, 180, 192)  # as `regard.views.figures.canvas` draws it
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


def needle(n, at):
    """One weight of nearly 1, all others small and even."""
    torch.manual_seed(0)
    q, k = 0.2 * torch.randn(2, 1, 1, n, 8)
    q[0, 0, at[0], 0] = k[0, 0, at[1], 0] = 20.0
    return weights(q, k, mask=Causal())


@pytest.mark.parametrize("keep", [None, "pool:512", "only means"])
def test_the_largest_weight_of_a_cell_is_never_its_mean(chromium, keep, monkeypatch):
    """From stored maps, since nothing is computed here that takes longer than a preview."""
    n, (row, col) = 2048, (1500, 300)
    A = needle(n, (row, col))
    dense = A.dense()[0, 0]
    tape = tape_of(A)
    if keep is None:
        tape.summarize()
        monkeypatch.setattr(captures, "MAX_IMMEDIATE_WEIGHTS", 1000)
    else:
        kept = {"pool:512": A.pool(512, 512), "peaks:512": A.pool(512, 512, "max")}
        measures = {name: TensorInMemory(x) for name, x in kept.items() if keep == "pool:512" or name == "pool:512"}
        tape = tape_of(Reduced(A.shape, measures))
    with shown(chromium, tape) as watched:
        watched.go(view="map", pool="max", range="full")
        watched.page.locator(".legend-label", has_text="largest of").wait_for()
        header, *rows = watched.table()
        size = 2 ** int(rows[0][header.index("level")])
        [found] = [r for r in rows if int(r[0]) == row // size * size and int(r[2]) == col // size * size]
        largest = found[header.index("largest weight")]
        if keep == "only means":
            assert largest == ""
            assert watched.text(".legend-label").endswith("(grey: not kept in this capture)")
            assert set(watched.colours(".deep canvas")) & {NO_NUMBER}
        else:
            assert float(largest) == pytest.approx(float(A[0, 0, row, col]), rel=1e-3)
            assert "grey" not in watched.text(".legend-label")
        if keep == "pool:512":
            for r in rows[::501]:
                i, j = int(r[0]), int(r[2])
                truth = float(dense[i : i + size, j : j + size].max())
                assert float(r[header.index("largest weight")]) == pytest.approx(truth, rel=1e-3)
