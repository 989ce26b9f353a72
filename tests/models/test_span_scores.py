"""Best spans: those of a search by hand, and none where no token may be in one."""

from __future__ import annotations

import pytest
import torch

from regard.models import best_spans, top_spans


@pytest.mark.parametrize("longest", [None, 1, 3])
def test_best_spans_are_those_of_a_search_by_hand(longest):
    for _ in range(20):
        start, end = torch.randn(2, 4, 9)
        among = torch.rand(4, 9) < 0.6
        among[:, 5] = True
        found = best_spans(start, end, among=among, longest=longest)
        for row in range(4):
            spans = [
                (float(start[row, i] + end[row, j]), i, j)
                for i in range(9)
                for j in range(i, 9)
                if among[row, i] and among[row, j] and (longest is None or j - i < longest)
            ]
            assert tuple(found[row].tolist()) == max(spans)[1:]


@pytest.mark.parametrize("n", [0, 3])
def test_a_row_without_a_token_for_a_span_is_refused(n):
    start, end, among = torch.zeros(2, n), torch.zeros(2, n), torch.zeros(2, n, dtype=torch.bool)
    among[:1] = True
    with pytest.raises(ValueError, match=f"every row must .* got none in row {int(n > 0)}: .*; drop such"):
        best_spans(start, end, among=among)


def test_top_spans_are_in_order_and_end_in_impossible_ones():
    start, end = torch.randn(2, 3, 5)
    scores, spans = top_spans(start, end, k=30, longest=2)
    possible = 5 + 4
    assert scores.shape == (3, 30)
    assert (scores[:, possible:] == -torch.inf).all()
    assert (scores[:, :possible].diff() <= 0).all()
    for row in range(3):
        first, last = spans[row, :possible].T
        torch.testing.assert_close(scores[row, :possible], start[row, first] + end[row, last])
        assert {*(last - first).tolist()} == {0, 1}
    assert torch.equal(spans[:, 0], best_spans(start, end, longest=2))
