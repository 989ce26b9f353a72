"""What a reader sees in the viewer, cards, legends and CSV, beside the truth."""

from __future__ import annotations

import re

import pytest
import torch

from regard import Causal, Padding, weights
from regard.lens import Tape
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.views import page
from regard.views.viewer import captures
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

BIG = ["the", "trophy", "does", "not", "fit", "it", "is", "too", "big", "."]
NO_NUMBER = (159, 180, 192)  # as `regard.views.figures.canvas` draws it
KINDS = ("self", 9), ("cross", 5)
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


def truth_of(A, head=0, batch=0):
    """The matrix of a head in float64."""
    call = A.call
    kv = head * call.k.shape[1] // call.q.shape[1]
    q, k = call.q[batch : batch + 1, head : head + 1].double(), call.k[batch : batch + 1, kv : kv + 1].double()
    return weights(q, k, mask=call.mask).dense("2GB")[0, 0]


@pytest.fixture
def coded(monkeypatch):
    """Pages in codes of one byte, however small."""
    monkeypatch.setitem(page.__globals__, "MAX_FLOAT_CELLS", 100)


def changed_pair(n=60):
    """Two captures that differ in a head by little, in another by less."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, n, 8)
    other = q + torch.tensor([1e-3, 1e-1, 1e-2]).view(1, 3, 1, 1) * torch.randn_like(q)
    return [tape_of(weights(x, k, mask=Causal())) for x in (q, other)]


@pytest.mark.parametrize("offline", [False, True])
def test_differences_are_taken_before_anything_is_coded(chromium, tmp_path, coded, offline):
    one, other = changed_pair()
    less = [truth_of(one[0], head) - truth_of(other[0], head) for head in range(3)]
    one.page(other).save(tmp_path / "page.html")
    place = opened(chromium, (tmp_path / "page.html").as_uri()) if offline else shown(chromium, one, other)
    with place as watched:
        watched.go(against="capture", sort="difference")
        header, *rows = watched.table()
        assert [int(row[1]) for row in rows] == [1, 2, 0]
        for row in rows:
            found = float(row[header.index("difference A \u2212 B")])
            assert found == pytest.approx(float(less[int(row[1])].abs().mean()), rel=1e-3)
        assert watched.text(".overview .legend-label") == "mean of each cell, A \u2212 B; one scale for all heads"
        for capture, sign in ((0, 1), (1, -1)):
            watched.go(view="map", capture=capture, against="capture", head=0, layout="difference")
            header, *rows = watched.table()
            for row in rows:
                truth = sign * float(less[0][int(row[0]), int(row[3])])
                found = float(row[header.index("A \u2212 B: mean weight")])
                assert found == pytest.approx(truth, rel=2e-3, abs=1e-7)
        if offline:
            watched.go(view="map", against="head.1", head=0, layout="difference")
            assert "to within 3 %, too coarse for this difference" in watched.text(".stage")


def test_an_overview_of_some_queries_says_so_until_all_are_measured(chromium, monkeypatch):
    torch.manual_seed(0)
    A = weights(*torch.randn(2, 1, 2, 1200, 8), mask=Causal())
    tape, truth = tape_of(A), A.entropy()[0].mean(-1)
    monkeypatch.setattr(captures, "MAX_IMMEDIATE_WEIGHTS", 1000)
    monkeypatch.setattr(captures, "MAX_BACKGROUND_WEIGHTS", 0)
    with shown(chromium, tape) as watched:
        assert watched.page.locator(".thumb.sampled").count() == 2
        assert watched.text(".overview .known").endswith("hatched: from 16 of 1,200 queries")
        assert "from 16 of 1,200 queries" in watched.page.get_attribute("button.head", "title")
        header, *rows = watched.table()
        assert [row[header.index("state")] for row in rows] == ["sampled: 16 of 1200 queries"] * 2
        watched.go(view="flow")
        assert "from 16 of 1,200 queries" in watched.text(".charts figcaption")
    monkeypatch.setattr(captures, "MAX_BACKGROUND_WEIGHTS", 2**31)
    monkeypatch.setattr(captures, "SAMPLE_RETRY_SECONDS", 0.05)
    with shown(chromium, tape) as watched:
        watched.page.locator(".thumb").first.wait_for()
        watched.page.locator(".thumb.sampled").first.wait_for(state="detached")
        header, *rows = watched.table()
        assert [row[header.index("state")] for row in rows] == ["exact"] * 2
        assert [float(row[header.index("entropy")]) for row in rows] == pytest.approx(truth.tolist(), rel=1e-5)


@pytest.mark.parametrize("offline", [False, True])
def test_padding_is_not_shown_as_data(chromium, tmp_path, offline):
    torch.manual_seed(0)
    lengths, n = (25, 13), 25
    q, k = torch.randn(2, 2, 2, n, 8)
    tape = tape_of(weights(q, k, mask=Padding(torch.tensor(lengths))))
    tape.tokens = [[f"w{i}" if i < m else "<pad>" for i in range(n)] for m in lengths]
    alone = weights(q[1:, :, :13], k[1:, :, :13])
    tape.page().save(tmp_path / "page.html")
    place = opened(chromium, (tmp_path / "page.html").as_uri()) if offline else shown(chromium, tape)
    with place as watched:
        watched.go(batch=1)
        header, *rows = watched.table()
        entropy = [float(row[header.index("entropy")]) for row in rows]
        assert entropy == pytest.approx(alone.entropy()[0].mean(-1).tolist(), rel=1e-5)
        assert watched.page.locator("button.head >> nth=0").locator(".padding").count() == 2
        watched.go(view="map", batch=1)
        header, *rows = watched.table()
        for row in rows:
            i, j, weight = int(row[0]), int(row[2]), float(row[header.index("mean weight")])
            if max(i, j) < 13:
                assert weight == pytest.approx(float(alone[0, 0, i, j]), rel=1e-5)
            else:
                assert (weight, row[header.index("state")]) == (0, "padding")
        watched.go(view="flow", batch=1)
        assert watched.text(".flow h2") == "Where w12 12 comes from"


def test_a_page_of_links_says_at_least_and_never_another_order(chromium, tmp_path, monkeypatch):
    torch.manual_seed(0)
    n = 300
    q, k = torch.randn(2, 1, 1, n, 8)
    q[..., 0] = 3
    k[..., 7, 0], k[..., 9, 0] = 6, 4
    A = weights(q, k)
    monkeypatch.setitem(page.__globals__, "MAX_CELLS", 5000)
    tape_of(A).page().save(tmp_path / "page.html")
    truth = truth_of(A)
    with opened(chromium, (tmp_path / "page.html").as_uri()) as watched:
        watched.go(view="text", chosen="12,12")
        ends, found = watched.links("section[data-side=query]")
        assert ends == truth[12].argsort(descending=True)[: len(ends)].tolist()
        assert found == pytest.approx(truth[12][ends].tolist(), rel=0.06)
        assert "only the 8 strongest links of each token are held" in watched.text(".text aside")
        watched.go(view="text", chosen="10,29")
        mean = truth[10:30].mean(0)
        assert watched.text("section[data-side=query] h3") == "looks at, mean of 20 queries"
        assert watched.text("section[data-side=key] h3") == "is seen by, sum over 20 keys"
        ends = watched.page.locator("section[data-side=query] li button").evaluate_all(
            "all => all.map(o => +o.dataset.n)"
        )
        assert ends == mean.argsort(descending=True)[: len(ends)].tolist()
        assert ends[:2] == [7, 9]
        said = watched.page.locator("section[data-side=query] .number").all_inner_texts()
        assert all(text.startswith("\u2265 ") for text in said)
        for side, position, _, weight, state, _ in watched.table()[1:]:
            whole = mean if side == "looks at" else truth[:, 10:30].sum(1)
            assert state == "partial"
            assert float(weight) <= 1.03 * float(whole[int(position)])


def test_the_mean_over_neighbours_is_named_as_one(chromium, tmp_path):
    torch.manual_seed(0)
    n = 400
    q, k = torch.randn(2, 1, 1, n, 8)
    q[:, :, ::2] *= 5  # every second query is sharp
    tape = tape_of(weights(q, k, mask=Causal()))
    A = truth_of(tape[0])
    entropy, received = torch.special.entr(A).sum(-1), A.sum(0)
    tape.page().save(tmp_path / "page.html")
    for place, size in ((shown(chromium, tape), 1), (opened(chromium, (tmp_path / "page.html").as_uri()), 4)):
        with place as watched:
            watched.go(view="map", at="200.5,100.5,6")
            watched.point()
            told = watched.text(".card p.faint")
            numbers = [float(x) for x in re.findall(r"\d+\.\d+(?:e.\d+)?", told.replace("\u2212", "-"))]
            truth = [float(entropy[200 : 200 + size].mean()), float(received[100 : 100 + size].mean())]
            assert numbers == pytest.approx(truth, rel=0.02)
            assert told.startswith("entropy of the query" if size == 1 else "mean entropy of queries 200\u2013203")


def test_the_end_of_the_legend_says_or_more(chromium):
    torch.manual_seed(0)
    A = needle(60, (50, 10))
    with shown(chromium, tape_of(A)) as watched:
        watched.go(view="map", range="full")
        assert watched.page.locator(".legend .tick text").last.text_content() == "1"
        watched.go(view="map", range="auto")
        watched.page.locator(".legend .tick text", has_text="\u2265").wait_for(state="attached")
        end = watched.page.locator(".legend .tick text").last.text_content()
        assert float(end.removeprefix("\u2265 ")) < float(A[...].max())


def test_a_table_of_a_part_of_the_cells_says_so(chromium):
    with shown(chromium, tape_of(needle(1200, (50, 10)))) as watched:
        watched.page.set_viewport_size({"width": 2000, "height": 1700})
        watched.go(view="map")
        table = watched.table()
    assert len(table) == 1_000_000 + 2
    assert table[-1] == ["only the first 1000000 of 1440000 cells on screen; zoom in for the others"]


def test_lines_say_how_much_goes_outside_of_their_window(chromium, tmp_path):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 80, 8)
    k[..., 0, :] *= 4
    tape = tape_of(weights(q, k, mask=Causal()))
    A = tape[0].dense()[0]
    tape.page().save(tmp_path / "page.html")
    for place in (shown(chromium, tape), opened(chromium, (tmp_path / "page.html").as_uri())):
        with place as watched:
            watched.go(view="lines", window="40,40,16")
            share = 1 - float(A[:, 40:56, 40:56].sum()) / (2 * 16)
            strongest, outside = watched.text(".lines .scale").split("; ")
            assert outside == f"{round(100 * share)} % of what these queries give goes to keys outside of this window"
            assert float(strongest.rpartition(" ")[2]) == pytest.approx(float(A[:, 40:56, 40:56].max()), rel=1e-3)


def test_charts_keep_self_and_cross_attention_apart(chromium):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 9, 8)
    tape = Tape({(f"decoder.{n}.{kind}", 0): weights(q, k[:, :, :m]) for n in range(2) for kind, m in KINDS})
    tape.tokens = {"*": list("abcdefghi"), "*.cross": (list("abcdefghi"), list("vwxyz"))}
    with shown(chromium, tape) as watched:
        watched.go(view="flow")
        charts = watched.page.locator(".charts figure")
        assert [charts.nth(n).locator("path.mean").count() for n in range(2)] == [2, 2]
        assert [charts.nth(n).locator("circle").count() for n in range(2)] == [8, 4]
        assert charts.nth(1).locator("figcaption").inner_text().endswith("of self-attention alone")
