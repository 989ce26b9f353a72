"""Greedy search against a loop, and batches, padding and log-probabilities of every search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.decode import beam, greedy, sample
from tests.decode.searches import END, MODELS, MOST, ROWS, SEARCHES, starts, tokens
from tests.decode.steppers import Recurrent, Table, flat


def test_greedy_is_the_likeliest_token_at_every_step():
    model = Table(9, 1)
    for code, found in enumerate(greedy(model, torch.arange(30), [[0]] * 30, end=END, max_length=MOST)):
        at, token, expected = code, 0, []
        while len(expected) < MOST and token != END:
            at = model.follow(at, token)
            token = max(range(9), key=model.costs[at].__getitem__)
            expected.append(token)
        assert found.tokens == tuple(expected)
        assert found.finished == (token == END)
        assert found.log_probabilities == pytest.approx(model.log_probabilities(code, [0], expected))
        assert found.score == found.log_probability == pytest.approx(sum(found.log_probabilities))


def test_every_search_reports_the_log_probability_of_its_tokens(search):
    model, source = Table(9, 2), torch.arange(ROWS)
    for code, best in enumerate(search(model, source, starts(), end=END, max_length=MOST, min_length=3, no_repeat=2)):
        for one in best:
            expected = model.log_probabilities(code, [code], one.tokens)
            assert one.log_probabilities == pytest.approx(expected)
            assert one.log_probability == pytest.approx(sum(expected))


@pytest.mark.parametrize("name", ["greedy", "beam"])
@pytest.mark.parametrize("kind", ["table", "recurrent"])
def test_batch_equals_single_in_any_order(name, kind):
    model, source = MODELS[kind]
    given = [[1], [1, 8, 3], [2, 2], [5, 4, 3], [0], [8]]
    limits = {"end": END, "max_length": MOST, "min_length": 2, "no_repeat": 3}
    whole = tokens(SEARCHES[name](model, source, given, **limits))
    assert len(set(map(str, whole))) >= 5
    for row in range(ROWS):
        assert tokens(SEARCHES[name](model, source[[row]], [given[row]], **limits)) == [whole[row]]
    order = [3, 0, 5, 5, 1]
    shuffled = tokens(SEARCHES[name](model, source[order], [given[row] for row in order], **limits))
    assert shuffled == [whole[row] for row in order]


def test_padding_changes_nothing(search):
    model, short = Recurrent(), torch.randint(1, 11, (4, 3), generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(short, (0, 6))
    limits = {"end": 10, "max_length": MOST}
    one, two = (search(model, source, [[1]] * 4, **limits) for source in (short, padded))
    assert tokens(one) == tokens(two)
    for a, b in zip(flat(one), flat(two), strict=True):
        torch.testing.assert_close(a.attention["source"], b.attention["source"][..., :3])
        assert not b.attention["source"][..., 3:].any()


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6), st.integers(1, 6), st.integers(0, 3))
def test_greedy_beam_and_sampling_agree_where_one_token_is_certain(seed, rows, vocabulary, most, ragged):
    model = Table(vocabulary, seed, sharpness=1e3)
    given = [[0] * (1 + row % (ragged + 1)) for row in range(rows)]
    data, limits = (model, torch.arange(rows), given), {"end": vocabulary - 1, "max_length": most}
    best = [[one.tokens] for one in greedy(*data, **limits)]
    assert tokens(beam(*data, width=3, **limits)) == best
    assert tokens(sample(*data, seed=seed, **limits)) == best


def test_finished_rows_are_no_longer_computed():
    model = Table(4, 0)
    found = greedy(model, torch.arange(40), [[0]] * 40, end=3, max_length=30)
    assert model.rows == [sum(len(one.tokens) > step for one in found) for step in range(len(model.rows))]
    assert model.rows[0] == 40
    assert model.rows[-1] < 40


def test_nothing_is_recorded_for_gradients(search):
    found = search(Recurrent(vocabulary=9), MODELS["recurrent"][1], starts(), end=END, max_length=4)
    assert not any(one.attention["source"].requires_grad for one in flat(found))
