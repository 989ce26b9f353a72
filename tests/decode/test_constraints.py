"""Limits of every search: lengths, ends, n-grams that come once, tokens that are forbidden."""

from __future__ import annotations

import pytest
import torch

from regard.decode.constraints import PAD, forbid_repeats
from tests.decode.searches import END, MODELS, MOST, ROWS, starts
from tests.decode.steppers import Table, flat


@pytest.mark.parametrize("least", [0, 1, 5, MOST])
def test_lengths_are_honoured(search, model, least):
    found = search(*model, starts(), end=END, max_length=MOST, min_length=least)
    for one in flat(found):
        assert len(one.tokens) <= MOST
        assert END not in one.tokens[:-1]
        assert one.finished == (one.tokens[-1] == END)
        assert len(one.tokens) - one.finished >= least
        assert one.finished or len(one.tokens) == MOST


@pytest.mark.parametrize("least", [0, 1, 5])
def test_an_end_may_come_as_soon_as_the_least_length_is_reached(search, least):
    model = Table(9, 0)
    model.logits[:, END] += 50
    for best in search(model, torch.arange(3), [[0], [END], [1, END, 2]], end=END, max_length=MOST, min_length=least):
        assert len(best[0].tokens) == least + 1


def test_every_token_may_be_an_end(search):
    found = search(Table(9, 0), torch.arange(3), [[0]] * 3, end=range(9), max_length=MOST)
    assert all(one.finished and len(one.tokens) == 1 for one in flat(found))


def test_an_end_in_the_prefix_is_no_reason_not_to_end(search):
    model = Table(9, 0)
    model.logits[:, END] += 50
    found = search(model, torch.arange(3), [[0], [END], [1, END, 2]], end=END, max_length=MOST, no_repeat=1)
    assert [best[0].tokens for best in found] == [(END,)] * 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_n_gram_comes_twice(search, model, n):
    given = torch.randint(8, (ROWS, n), generator=torch.Generator().manual_seed(n))
    found = search(*model, given, end=END, max_length=30, min_length=30, no_repeat=n)
    for row, best in enumerate(found):
        for one in best:
            text = (*given[row].tolist(), *one.tokens)
            grams = [text[at : at + n] for at in range(len(text) - n + 1)]
            assert len(grams) == len(set(grams))


def test_an_end_comes_early_where_nothing_else_may(search):
    found = search(Table(4, 0), torch.arange(3), [[0]] * 3, end=3, max_length=9, min_length=9, no_repeat=1)
    assert {one.tokens for one in flat(found)} <= {(1, 2, 3), (2, 1, 3)}


def test_nothing_left_to_say_and_no_end_is_an_error(search):
    with pytest.raises(
        ValueError, match="no_repeat=1 leaves no token to choose from after 4 of a vocabulary of 4; pass"
    ):
        search(Table(4, 0), torch.arange(3), [[0]] * 3, end=None, max_length=9, no_repeat=1)


@pytest.mark.parametrize("no_repeat", [None, 2])
def test_what_is_forbidden_is_never_chosen_and_the_rest_keeps_its_probability(search, no_repeat):
    model = Table(9, 3)
    model.logits[:, 4] += 3
    limits = {"end": END, "max_length": MOST, "min_length": 2, "no_repeat": no_repeat}
    assert any(4 in one.tokens for one in flat(search(model, torch.arange(ROWS), starts(), **limits)))
    found = search(model, torch.arange(ROWS), starts(), forbid=(4, 1), **limits)
    for code, best in enumerate(found):
        for one in best:
            assert not {1, 4} & set(one.tokens)
            assert one.log_probabilities == pytest.approx(model.log_probabilities(code, [code], one.tokens))


def test_without_an_end_every_hypothesis_is_as_long_as_it_may_be(search, model):
    for one in flat(search(*model, starts(), end=None, max_length=MOST)):
        assert len(one.tokens) == MOST
        assert not one.finished


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"max_length": 0}, ValueError, "max_length must be 1 or more, got 0"),
        ({"max_length": 2.5}, TypeError, r"max_length must be a whole number, got 2.5 \(float\)"),
        ({"min_length": -1}, ValueError, "min_length must be 0 or more, got -1"),
        ({"min_length": 13}, ValueError, "min_length must be at most max_length, got min_length=13 and max_length=12"),
        ({"no_repeat": 0}, ValueError, "no_repeat must be 1 or more, got 0"),
        ({"end": -1}, ValueError, "end must be 0 or more, got -1"),
        ({"end": 9}, ValueError, "end must be within the vocabulary of 9, got 9"),
        ({"end": True}, TypeError, r"end must be a whole number, got True \(bool\)"),
        ({"forbid": (9,)}, ValueError, "forbid must be within the vocabulary of 9, got 9"),
        ({"forbid": (2.0,)}, TypeError, r"forbid must be a whole number, got 2.0 \(float\)"),
        ({"forbid": (1, END)}, ValueError, "forbid must not contain an end token, got 8 in both"),
        ({"forbid": range(8)}, ValueError, "forbid must leave a token to choose, but forbid and end hold all 9 tokens"),
        (
            {"end": range(9), "min_length": 1},
            ValueError,
            "end must leave a token to choose before min_length=1, got all 9 tokens of the vocabulary; pass",
        ),
    ],
    ids=str,
)
def test_limits_say_what_they_cannot_do(search, limits, error, message):
    with pytest.raises(error, match=message):
        search(*MODELS["table"], starts(), **({"end": END, "max_length": MOST} | limits))


def test_the_padding_of_a_short_prompt_forbids_no_token():
    history = torch.tensor([[PAD, PAD, 3], [2, 3, 2]])
    assert forbid_repeats(torch.zeros(2, 5), history, 1).isneginf().tolist() == [
        [False, False, False, True, False],
        [False, False, True, True, False],
    ]
    assert forbid_repeats(torch.zeros(2, 5), history, 2).isneginf().nonzero().tolist() == [[1, 3]]
