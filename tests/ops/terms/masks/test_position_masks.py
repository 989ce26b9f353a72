"""Masks of positions alone: their ways of being written, and the words of a rule that fails."""

from __future__ import annotations

import pytest
import torch

from regard import Causal, Global, Neighborhood, Rule, Window, attend, weights


def points():
    return torch.meshgrid(*map(torch.arange, (2, 3, 5, 7)), indexing="ij")


@pytest.mark.parametrize("tokens", [Global(3), Global((0, 1, 2)), Global(range(3)), Global(torch.arange(3))], ids=repr)
def test_a_count_of_global_tokens_is_the_positions_from_the_start(tokens):
    assert torch.equal(tokens(*points()), Global([2, 1, 0])(*points()))


@pytest.mark.parametrize(
    ("window", "reach"),
    [
        (Window(1), (0, 0)),
        (Window(4), (3, 3)),
        (Window(before=3, after=0), (3, 0)),
        (Window(before=0, after=2), (0, 2)),
    ],
    ids=repr,
)
def test_the_reach_of_a_window_leaves_out_its_own_position(window, reach):
    assert window.reach == reach


def test_a_rule_that_fails_on_its_own_raises_its_own_error():
    def table(b, h, i, j):
        return {}["missing"]

    with pytest.raises(KeyError, match="missing"):
        Rule(table)(*points())
    with pytest.raises(RuntimeError, match="must match the size"):
        Rule(lambda b, h, i, j: i < torch.zeros(4))(*points())


def test_a_rule_written_in_c_has_no_signature_and_still_runs():
    class Later:
        """Callable, and its signature cannot be read."""

        __signature__ = "none"

        def __call__(self, b, h, i, j):
            return j > i

    b, h, i, j = points()
    assert torch.equal(Rule(Later())(b, h, i, j), j > i)


def test_global_positions_are_kept_as_a_tuple_of_python_numbers():
    assert Global([2, 1]).tokens == (2, 1)
    assert Global(range(3)).tokens == (0, 1, 2)
    assert Global(torch.tensor(3).item()).tokens == 3


def test_no_query_before_the_first_position_is_global():
    q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    seen = weights(q, k, mask=Causal() | Global(1), offset=-2).dense()[0, 0] > 0  # positions -2, -1, 0, 1
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize(("shape", "window"), [((3, 4), 3), ((5, 3), (2, 3)), ((1, 7), (1, 4)), ((4, 4), (4, 1))])
def test_a_neighborhood_is_that_of_a_loop_over_its_grid_in_float64(shape, window):
    rows, cols = shape
    high, wide = window if isinstance(window, tuple) else (window, window)
    n = rows * cols
    q, k, v = torch.randn(3, 2, 2, n, 8, dtype=torch.float64)
    want = torch.zeros_like(v)
    for y in range(rows):
        for x in range(cols):
            top, left = min(max(y - high // 2, 0), rows - high), min(max(x - wide // 2, 0), cols - wide)
            keys = [a * cols + b for a in range(top, top + high) for b in range(left, left + wide)]
            A = (q[:, :, y * cols + x, None] @ k[:, :, keys].mT / 8**0.5).softmax(-1)
            want[:, :, y * cols + x] = (A @ v[:, :, keys]).squeeze(2)
    mask = Neighborhood(shape, window)
    torch.testing.assert_close(attend(q, k, v, mask=mask), want)
    assert ((weights(q, k, mask=mask).dense() > 0).sum(-1) == high * wide).all()


def test_keys_past_the_grid_are_seen_by_no_query_of_a_neighborhood():
    q, k = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 8, 4)
    assert (weights(q, k, mask=Neighborhood((2, 3), 2)).dense()[..., 6:] == 0).all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Neighborhood(9, 3), TypeError, r"Neighborhood shape must be \(rows, columns\), got 9; write shape="),
        (lambda: Neighborhood((3, 3), (1, 2, 3)), TypeError, r"Neighborhood window must be \(rows, columns\)"),
        (lambda: Neighborhood((3, 3), 0), ValueError, "Neighborhood window must be 1 or more, got 0"),
        (lambda: Neighborhood((3, 5), 4), ValueError, r"must fit in the grid \(3, 5\), got \(4, 4\)"),
        (lambda: weights(*torch.zeros(2, 1, 1, 8, 2), mask=Neighborhood((3, 3), 3)), ValueError, "9 cells, got i=8"),
    ],
)
def test_neighborhoods_that_do_not_fit_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
