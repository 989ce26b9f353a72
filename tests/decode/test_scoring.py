"""Forced log-probabilities: by hand, and those the searches report for what they find."""

from __future__ import annotations

import pytest
import torch

from regard.decode import beam, greedy, score
from tests.decode.steppers import Cached, Recurrent, Table, flat

PREFIX = [[1], [2, 5, 3], [4, 4]]
TARGETS = [[(1, 2, 8), (), (3,)], [], [(0, 0, 0, 0, 0), (7, 8)]]


def test_scores_are_sums_of_log_probabilities():
    model, source = Table(9, 0), torch.tensor([4, 8, 15])
    found = score(model, source, PREFIX, TARGETS)
    assert [[one.tokens for one in best] for best in found] == TARGETS
    for row, best in enumerate(found):
        for one in best:
            expected = model.log_probabilities(source[row].item(), PREFIX[row], one.tokens)
            assert one.log_probabilities == pytest.approx(expected)
            assert one.score == one.log_probability == pytest.approx(sum(expected))


@pytest.mark.parametrize("positions", [1, 7, 1024])
@pytest.mark.parametrize("kind", [Recurrent, Cached])
def test_scoring_what_a_search_found_gives_its_log_probabilities_and_attention(monkeypatch, positions, kind):
    monkeypatch.setattr("regard.decode.prefix.POSITIONS_PER_PIECE", positions)
    model = kind()
    source = torch.randint(1, 11, (3, 5)) if kind is Recurrent else 3
    found = beam(model, source, PREFIX, width=4, n_best=4, end=10, max_length=9)
    again = score(model, source, PREFIX, [[one.tokens for one in best] for best in found])
    for one, forced in zip(flat(found), flat(again), strict=True):
        assert forced.log_probabilities == pytest.approx(one.log_probabilities)
        for name, seen in one.attention.items():
            torch.testing.assert_close(forced.attention[name][..., : seen.shape[-1]], seen)


def test_greedy_text_scores_what_greedy_said():
    model, source = Table(9, 3, dtype=torch.float32), torch.arange(3)
    found = greedy(model, source, PREFIX, end=8, max_length=9)
    again = score(model, source, PREFIX, [[one.tokens] for one in found])
    assert [best[0].log_probability for best in again] == pytest.approx([one.log_probability for one in found])


def test_no_candidates_give_no_scores():
    assert score(Table(9, 0), torch.arange(2), [[0], [0]], [[], []]) == [[], []]
    assert score(Table(9, 0), torch.arange(0), [], []) == []


def test_targets_must_match_the_rows():
    with pytest.raises(ValueError, match="targets must be within the vocabulary of 9, got 9; pass tokens the model"):
        score(Table(9, 0), torch.arange(1), [[0]], [[(1, 9)]])
    with pytest.raises(ValueError, match="targets must hold a list of candidates for each of the 3 rows, got 1"):
        score(Table(9, 0), torch.arange(3), PREFIX, [[(1,)]])
    for one in ([1], [[1, 2]], torch.tensor([[1, 2]])):
        with pytest.raises(TypeError, match=r"for each row, each a list of tokens \(.*\); write \[\[tokens\]\]"):
            score(Table(9, 0), torch.arange(1), [[0]], one)
