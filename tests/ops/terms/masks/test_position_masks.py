"""Masks of positions alone: their ways of being written, and the words of a rule that fails."""

from __future__ import annotations

import pytest
import torch

from regard import Causal, Global, Rule, Window, weights


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
