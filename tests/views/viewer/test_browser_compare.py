"""Two captures of texts of different lengths in a browser: ranked heads, and both maps beside each other."""

from __future__ import annotations

import pytest

from tests.views.browser import opened, shown
from tests.views.viewer.test_two_captures import OURS, THEIRS, tape_of

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("offline", [False, True])
def test_heads_are_ranked_and_open_as_two_maps_with_the_same_words_beside_each_other(chromium, tmp_path, offline):
    ours, theirs = tape_of(OURS, 0), tape_of(THEIRS, 1)
    A, B = ([A.dense()[0] for A in tape.values()] for tape in (ours, theirs))
    if offline:
        ours.page(theirs).save(tmp_path / "page.html")
    place = opened(chromium, (tmp_path / "page.html").as_uri()) if offline else shown(chromium, ours, theirs)
    with place as watched:
        page = watched.page
        watched.press("8")
        expected = ours.compare(theirs)
        assert watched.numbers(".ranked td:nth-child(3)") == pytest.approx(list(expected["difference"]), rel=6e-3)
        for by in ("js", "mse"):
            page.select_option("[data-control='rank by']", by)
            assert watched.numbers(".ranked td:nth-child(3)") == pytest.approx(
                list(ours.compare(theirs, by=by)[by]), rel=6e-3
            )
        page.select_option("[data-control='rank by']", "difference")
        page.focus(".compare")
        assert page.locator(".edits del").all_inner_texts() == ["so", "big"]
        assert page.locator(".edits ins").all_inner_texts() == ["now just", "small"]
        assert float(watched.table()[1][2]) == pytest.approx(expected["difference"][0], rel=1e-6)

        page.locator(".ranked .open").first.click()
        watched.settle()
        layer, head = ours.layers.index(expected["layer"][0]), int(expected["head"][0])
        chosen = int(expected["query"][0])
        assert watched.state.items() >= {"view": "map", "against": "capture", "chosen": f"{chosen},{chosen}"}.items()
        assert page.locator(".panel .caption b").all_inner_texts() == ["A", "B"]
        sides = [page.locator(".panel").nth(n).locator(".axis.left .tick text") for n in (0, 1)]
        assert [sorted(side.all_text_contents()) for side in sides] == [sorted(OURS), sorted(THEIRS)]
        assert page.locator(".legend-label:visible").all_inner_texts() == ["A and B: weight"]
        assert page.locator("[role=group][aria-label=layout]").count() == 0  # there is no difference to choose

        watched.go(view="map", against="capture", layer=layer, head=head, at="4.5,2.5,4")
        rows = [
            {one.text_content(): one.bounding_box()["y"] for one in side.all() if one.text_content()} for side in sides
        ]
        assert rows[0]["too"] == pytest.approx(rows[1]["too"], abs=1)
        for panel in (0, 1):  # the same pair of words, under the pointer in either
            assert watched.point(panel) == pytest.approx(
                [float(A[layer][head, 4, 2]), float(B[layer][head, 5, 1])], rel=3e-2
            )
            assert watched.text(".card dt:has-text('query') + dd").startswith("too")
            assert watched.text(".card dt:has-text('key') + dd").startswith("trophy")

        page.keyboard.press("Escape")
        watched.go(view="map", against="capture", capture=1, layer=layer, head=head, at="3.5,1.5,4")
        assert watched.point(0) == pytest.approx([float(B[layer][head, 3, 1])], rel=3e-2)
        assert "not in B" in watched.text(".card")  # "now" is of one text alone
