"""Lines: weights and stripes of heads on hover, lines from one sentence to another, and what goes outside."""

from __future__ import annotations

import pytest
import torch

from regard import weights
from regard.lens import Tape
from tests.views.browser import shown

pytestmark = pytest.mark.browser

PAIR = ["[CLS]", "the", "trophy", "does", "not", "fit", "[SEP]", "the", "case", "is", "too", "small", ".", "[SEP]"]
WORDS = [*PAIR, *(f"word{n}" for n in range(16))]
HEADS, FIRST, SECOND = 3, range(7), range(7, 14)  # tokens of the two sentences


def stripes(watched):
    """The opacity of each stripe by the word that it stands at, head by head."""
    found = watched.page.locator(".stripe").evaluate_all(
        "all => all.map(one => [+one.dataset.n, +one.getAttribute('x'), +one.getAttribute('fill-opacity')])"
    )
    return [(at, opacity) for at, _, opacity in sorted(found)]


def test_lines_say_what_they_are(chromium):
    torch.manual_seed(0)
    tape = Tape({(f"layers.{n}", 0): weights(*2 * torch.randn(2, 1, HEADS, len(WORDS), 8)) for n in range(2)})
    tape.tokens = WORDS
    A = tape[0].dense()[0]
    with shown(chromium, tape) as watched:
        watched.go(view="lines", window="0,0,16")
        window = A[:, :16, :16]
        most = float(window.max())
        shares = watched.page.locator(".outside").evaluate_all("all => all.map(one => +one.dataset.share)")
        assert shares == pytest.approx((1 - window.sum(-1).mean(0)).tolist(), abs=1e-4)

        watched.page.hover(".columns .word >> nth=2")
        drawn = window[:, 2] > 0.02 * most  # fainter lines are left out
        truth = [
            (at, float(window[head, 2, at]) / most) for at in range(16) for head in range(HEADS) if drawn[head, at]
        ]
        found = stripes(watched)
        assert [at for at, _ in found] == [at for at, _ in truth]
        assert [opacity for _, opacity in found] == pytest.approx([weight for _, weight in truth], abs=1e-3)
        said = watched.page.locator(".columns .weight").evaluate_all(
            "all => all.map(one => [+one.dataset.n, one.textContent])"
        )
        assert sorted(at for at, _ in said) == [at for at in range(16) if drawn[:, at].any()]
        for at, text in said:
            weight, head = text.split(" head ")
            assert int(head) == int(window[:, 2, at].argmax())
            assert float(weight) == pytest.approx(float(window[int(head), 2, at]), rel=1e-3)
        watched.page.hover(".columns .word >> nth=20")  # a key: who looks at it
        assert [at for at, _ in stripes(watched)] == [
            at for at in range(16) for head in range(HEADS) if window[head, at, 4] > 0.02 * most
        ]
        watched.page.mouse.move(5, 5)
        assert watched.page.locator(".stripe, .columns .weight").count() == 0

        watched.go(view="lines", window="0,0,16", shown="1")
        row, col = divmod(int(window[1].argmax()), 16)
        box = watched.page.locator("svg.columns").bounding_box()
        middle = box["y"] + 34 + (row + col + 1) / 2 * 21
        watched.page.mouse.move(box["x"] + box["width"] / 2, middle)
        card = watched.text(".lines .card").split("\n")
        ends = card[0].split(" → ")
        at = [int(end.split()[-1]) for end in ends]
        assert [end.split()[0] for end in ends] == [WORDS[n] for n in at]
        assert sum(at) == row + col  # lines that cross in the middle
        assert float(card[-1]) == pytest.approx(float(window[1, at[0], at[1]]), rel=1e-3)

        watched.go(view="lines", window="0,0,16")
        for menu, options in (("from", ["any", "A", "B", "C"]), ("to", ["any", "A", "B", "C"])):
            texts = watched.page.locator(f"[data-control='{menu} sentence'] option").all_inner_texts()
            assert [text.partition(":")[0] for text in texts] == options
        for choice, queries, keys in (
            (("s0", "s1"), FIRST, SECOND),
            (("s1", "s1"), SECOND, SECOND),
            (("any", "s0"), None, FIRST),
        ):
            for menu, value in zip(("from", "to"), choice, strict=True):
                watched.page.select_option(f"[data-control='{menu} sentence']", value)
                watched.settle()
            header, *rows = watched.table()
            pairs = {(int(row[1]), int(row[3])) for row in rows}
            assert {j for _, j in pairs} == set(keys)
            assert queries is None or {i for i, _ in pairs} == set(queries)
            for row in rows:
                truth = float(A[int(row[0]), int(row[1]), int(row[3])])
                assert float(row[header.index("weight")]) == pytest.approx(truth, rel=1e-5)
        watched.go(view="lines", lines="model", window="0,0,16")
        inked = (
            "all => all.map(one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some(x => x))"
        )
        assert all(watched.page.locator(".lines canvas").evaluate_all(inked))
        watched.go(view="lines", lines="model", window="0,0,16", between="2-any")  # of which one query is in the window
        assert watched.page.locator("[data-control='from sentence']").input_value() == "s2"


def test_a_text_of_one_sentence_has_no_menus_of_sentences(chromium):
    tape = Tape({("layer", 0): weights(*torch.randn(2, 1, 2, 5, 4))})
    tape.tokens = ["all", "of", "one", "sentence", "."]
    with shown(chromium, tape) as watched:
        watched.go(view="lines", between="3-4")
        assert watched.page.locator(".between").count() == 0
        assert watched.page.locator(".outside").count() == 0  # nothing goes outside
        assert watched.page.locator(".link").count() > 0
