"""Rows of a search: a hypothesis that nothing may follow is dropped, and a row without any raises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from regard.decode import Ensemble, beam, greedy, sample
from regard.decode.frontier import log_sum_exp
from tests.decode.steppers import Table

INF, NAN = math.inf, math.nan
SEARCHES = {
    "greedy": lambda *data, **limits: [[one] for one in greedy(*data, **limits)],
    "sample": lambda *data, **limits: sample(*data, seed=3, samples=2, **limits),
    "sample of few": lambda *data, **limits: sample(*data, seed=3, top_k=2, top_p=0.9, **limits),
    "beam": lambda *data, **limits: beam(*data, width=2, n_best=2, **limits),
    "wide beam": lambda *data, **limits: beam(*data, width=9, **limits),
}


@pytest.fixture(params=SEARCHES)
def search(request):
    return SEARCHES[request.param]


class Grammar:
    """Logits by the last token alone, and which tokens were read."""

    def __init__(self, *logits):
        self.logits, self.read = torch.tensor(logits), set()

    def start(self, source):
        return self

    def step(self, tokens, state):
        self.read |= set(tokens.flatten().tolist())
        return self.logits[tokens], self

    def select(self, rows):
        return self


# From 0 to 0 or 1; from 1 nowhere; from 2 to 2, the end.
TRAP = Grammar([0.0, 0.5, -INF], [-INF] * 3, [-INF, -INF, 3.0])


@pytest.mark.parametrize("width", [2, 3, 4, 9])
def test_a_hypothesis_at_a_dead_end_makes_way_for_those_that_go_on(width):
    found = beam(TRAP, None, [[0], [2]], end=2, max_length=3, width=width, n_best=2)
    assert [[one.tokens for one in best] for best in found] == [[(0, 0, 1), (0, 0, 0)], [(2,)]]
    assert found[0][0].score == pytest.approx(-2 * math.log(1 + math.exp(0.5)) - math.log(1 + math.exp(-0.5)))


def test_what_is_impossible_is_never_read():
    model = Grammar([0.0, 1.0, -INF, -INF], [1.0, 0.0, -INF, -INF], [NAN] * 4, [NAN] * 4)
    found = beam(model, None, [[0]], end=None, max_length=3, width=12, n_best=12)[0]
    assert {one.tokens for one in found} == set(itertools.product((0, 1), repeat=3))
    assert model.read == {0, 1}


def test_a_row_without_a_way_on_is_told(search):
    with pytest.raises(ValueError, match=r"leave a token to choose, got none for row 1 after 0 chosen; return a logit"):
        search(TRAP, None, [[2], [1]], end=2, max_length=3)
    with pytest.raises(ValueError, match=r"got none for row 1 after 1 chosen"):
        search(TRAP, None, [[2], [0]], end=2, max_length=3, forbid=[0])


def test_a_given_token_may_follow_where_nothing_else_may(search):
    found = search(TRAP, None, [[2], [1, 2]], end=2, max_length=3)
    assert [best[0].tokens for best in found] == [(2,)] * 2


@pytest.mark.parametrize("odd", [[NAN] * 3, [0.0, NAN, 1.0], [0.0, INF, 1.0]], ids=str)
@pytest.mark.parametrize("most", [1, 4])
def test_a_model_that_gives_nan_is_told(search, odd, most):
    with pytest.raises(ValueError, match="step must return logits below inf, got nan or inf for row 1; look for nan"):
        search(Grammar([0.0, 1.0, 2.0], odd, [-INF, -INF, 0.0]), None, [[2], [1]], end=2, max_length=most)


def test_nan_is_told_though_another_hypothesis_is_over():
    model = Grammar([0.0, 1.0, 2.0], [NAN] * 3, [-INF, -INF, 0.0])
    with pytest.raises(ValueError, match="got nan or inf for row 0"):
        beam(model, None, [[0]], end=2, max_length=4, width=3, n_best=2)


def test_members_that_agree_on_nothing_are_told(search):
    both = Ensemble([Grammar([0.0, -INF]), Grammar([-INF, 0.0])], mean="logits")
    with pytest.raises(ValueError, match="got none for row 0 after 0 chosen"):
        search(both, None, [[0]], end=1, max_length=3)


def test_a_member_at_a_dead_end_leaves_the_choice_to_the_others(search):
    both = Ensemble([Grammar([-INF, -INF]), Grammar([-INF, 0.0])])
    assert search(both, None, [[0]], end=1, max_length=3)[0][0].tokens == (1,)


@pytest.mark.parametrize(("vocabulary", "most"), [(2, 4), (3, 6), (3, 8)])
def test_a_hypothesis_that_may_only_repeat_itself_makes_way_for_others(vocabulary, most):
    def repeats(text):
        grams = list(itertools.pairwise(text))
        return len(grams) > len(set(grams))

    every = {y for y in itertools.product(range(vocabulary), repeat=most) if not repeats((0, *y))}
    found = beam(
        Table(vocabulary, 0), torch.tensor([0]), [[0]], width=300, n_best=300, end=None, max_length=most, no_repeat=2
    )
    assert {one.tokens for one in found[0]} == every
    assert len(every) >= 1


def test_the_log_of_the_sum_of_exponentials_is_exact_with_tokens_ruled_out():
    logits = torch.randn(3, 501, dtype=torch.double) * 30
    logits[:, ::2] = -torch.inf
    exact = logits.exp().sum(-1).log()
    torch.testing.assert_close(log_sum_exp(logits), exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(log_sum_exp(logits.float() + 1e4), (exact + 1e4).float())
