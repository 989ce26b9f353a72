"""Prefixes of every search: tensors or lists of any lengths, read at once or in pieces, and never repeated."""

from __future__ import annotations

import pytest
import torch

from regard.decode import greedy
from tests.decode.searches import END, MOST, ROWS, tokens
from tests.decode.steppers import Cached, Table


def test_a_forced_prefix_may_hold_what_is_forbidden(search):
    model, source = Table(9, 3), torch.arange(2)
    found = search(model, source, [[0, 1, 4], [2]], end=END, max_length=MOST, forbid=(4, 1))
    alone = search(model, source[:1], [[0, 1, 4]], end=END, max_length=MOST, forbid=(4, 1))
    assert tokens(found[:1]) == tokens(alone)


def test_a_forced_prefix_is_read_and_not_repeated(search):
    model, source = Table(9, 0), torch.arange(ROWS)
    given = [[1], [1, 8, 3], [2, 2], [5, 4, 3, 2, 1], [0], [8]]
    found = search(model, source, given, end=END, max_length=MOST)
    for row, best in enumerate(found):
        for one in best:
            expected = model.log_probabilities(row, given[row], one.tokens)
            assert one.log_probabilities == pytest.approx(expected)
            assert one.score == pytest.approx(sum(expected))
            assert one.log_probability == pytest.approx(sum(expected))
            assert one.attention["code"].shape == (2, len(one.tokens), 1)
            assert one.attention["code"][0, :, 0].tolist() == model.codes(row, given[row], one.tokens)


def test_a_prefix_read_at_once_is_one_read_token_by_token(search):
    stepper = Cached(vocabulary=9)
    given = torch.randint(8, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    state = stepper.start(ROWS)
    for column in given[:, :-1].unbind(1):
        _, state = stepper.step(column, state)

    class Resumed:
        step = staticmethod(stepper.step)

        def start(self, source):
            return state

    whole = search(stepper, ROWS, given, end=END, max_length=MOST)
    assert tokens(whole) == tokens(search(Resumed(), None, given[:, -1:], end=END, max_length=MOST))


def test_long_prefixes_are_read_in_pieces(monkeypatch, search):
    given = torch.randint(8, (ROWS, 11), generator=torch.Generator().manual_seed(1))
    whole = search(Cached(vocabulary=9), ROWS, given, end=END, max_length=MOST)
    monkeypatch.setattr("regard.decode.prefix.POSITIONS_PER_PIECE", 4 * ROWS)
    assert tokens(search(Cached(vocabulary=9), ROWS, given, end=END, max_length=MOST)) == tokens(whole)


def test_no_rows_give_no_hypotheses(search):
    assert search(Table(4, 0), torch.arange(0), [], end=3, max_length=5) == []
    assert search(Table(4, 0), torch.arange(0), torch.empty(0, 2, dtype=torch.long), end=3, max_length=5) == []


@pytest.mark.parametrize(
    ("prefix", "error", "message"),
    [
        (
            [[0], []],
            ValueError,
            r"prefix must hold a token for each row, got none for row 1; write prefix=\[\[",
        ),
        (torch.arange(2), ValueError, r"prefix must have dims b n, got shape \(2,\); write prefix\[:, None\]"),
        (
            torch.zeros(1, 2, 3),
            ValueError,
            r"prefix must have dims b n, got shape \(1, 2, 3\); write prefix.view\(b, n\)",
        ),
        ([7, 8], TypeError, r"or b sequences of integers, got the row 7; write prefix=\[\[start\]\] \* b"),
        ([[0.5]], TypeError, r"or b sequences of integers, got the row \[0.5\]"),
        ([[0], [0], [0]], ValueError, r"step must return logits \(rows, vocabulary\) for 3 tokens, got shape \(2, 9\)"),
    ],
    ids=["empty", "1d", "3d", "flat", "float", "rows"],
)
def test_prefixes_say_what_they_cannot_be(prefix, error, message):
    class Fixed(Table):
        def step(self, tokens, state):
            return self.logits[:2], state

    with pytest.raises(error, match=message):
        greedy(Fixed(9, 0), torch.arange(2), prefix, end=END, max_length=MOST)


@pytest.mark.parametrize("token", [9, -1])
def test_a_longer_prefix_holds_tokens_of_the_vocabulary(search, token):
    with pytest.raises(ValueError, match=f"prefix must be within the vocabulary of 9, got {token}; pass tokens the"):
        search(Table(9, 0), torch.arange(2), [[0], [0, 3, token]], end=END, max_length=MOST)
