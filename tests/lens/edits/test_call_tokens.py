"""The tokens of a call: padding, cross-attention, and the steps of a generation with any cache."""

import pytest
import torch

from regard import Causal, Padding, Window
from regard.lens.edits.call_tokens import TokenFinder
from regard.lens.recording.observed import ObservedAttention


def seen(i, j, b=1, **terms):
    q, k = torch.zeros(b, 1, i, 2), torch.zeros(b, 1, j, 2)
    return ObservedAttention(q, k, k, **terms)


def places(axis):
    return [
        [int(n) if is_real else None for n, is_real in zip(*row, strict=True)]
        for row in zip(axis.positions, axis.real, strict=True)
    ]


def test_layers_with_one_mask_share_their_tokens():
    finder, mask = TokenFinder(None), Causal()
    assert finder.tokens_of("a", seen(4, 4, mask=mask)) is finder.tokens_of("b", seen(4, 4, mask=mask))


def test_padding_has_no_position():
    real = torch.tensor([[False, True, True, True], [True, True, False, False]])
    tokens = TokenFinder(None).tokens_of("layer", seen(4, 4, 2, mask=Causal() & Padding(real)))
    assert places(tokens.queries) == places(tokens.keys) == [[None, 0, 1, 2], [0, 1, None, None]]
    assert tokens.keys.count.tolist() == [[3], [2]]


def test_the_steps_of_a_generation_go_on_counting():
    finder = TokenFinder(None)
    real = torch.tensor([[False, True, True]])
    finder.tokens_of("layer", seen(3, 3, mask=Causal() & Padding(real)))
    for n in (4, 5):  # without a mask, as for a single query
        tokens = finder.tokens_of("layer", seen(1, n))
        assert places(tokens.queries) == [[n - 2]]
        assert places(tokens.keys) == [[None, *range(n - 1)]]
        assert tokens.keys.prompt.tolist() == [[2]]
    again = finder.tokens_of("layer", seen(2, 2, mask=Causal()))
    assert (places(again.keys), again.keys.prompt.tolist()) == ([[0, 1]], [[2]])


def test_a_cache_that_drops_tokens_keeps_their_positions():
    finder = TokenFinder(None)
    finder.tokens_of("layer", seen(4, 4, mask=Causal()))
    for step in range(3):
        tokens = finder.tokens_of("layer", seen(1, 3, mask=Window(3)))
        assert places(tokens.queries) == [[4 + step]]
        assert places(tokens.keys) == [[2 + step, 3 + step, 4 + step]]


def test_the_free_end_of_a_static_cache_has_no_positions():
    finder = TokenFinder(None)
    first = finder.tokens_of("layer", seen(3, 8, mask=Causal(), offset=0))
    assert places(first.queries) == [[0, 1, 2]]
    step = finder.tokens_of("layer", seen(1, 8, mask=Causal(), offset=3))
    assert places(step.queries) == [[3]]
    assert places(step.keys) == [[0, 1, 2, 3, None, None, None, None]]
    assert step.keys.prompt.tolist() == [[3]]


def test_rows_of_a_search_are_those_of_their_text():
    finder = TokenFinder([["a", "b"], ["c"]])
    finder.tokens_of("layer", seen(2, 2, 2, mask=Causal() & Padding((2, 1))))
    tokens = finder.tokens_of("layer", seen(1, 3, 4))
    assert places(tokens.keys) == [[0, 1, 2]] * 2 + [[0, None, 1]] * 2
    assert tokens.keys.texts == [["a", "b"], ["a", "b"], ["c"], ["c"]]
    with pytest.raises(ValueError, match="the batch changed from 4 to 3 rows within a generation"):
        finder.tokens_of("layer", seen(1, 4, 3))


def test_queries_of_a_cross_attention_are_those_of_its_block():
    finder = TokenFinder({"decoder.*.cross": ([["x", "y"]], [["a", "b", "c"]])})
    finder.tokens_of("encoder.0.self", seen(3, 3, mask=Padding((3,))))
    finder.tokens_of("decoder.0.self", seen(2, 2, mask=Causal()))
    cross = finder.tokens_of("decoder.0.cross", seen(2, 3))
    assert (places(cross.queries), places(cross.keys)) == ([[0, 1]], [[0, 1, 2]])
    assert cross.keys.texts == [["a", "b", "c"]]
    finder.tokens_of("decoder.0.self", seen(1, 3))
    cross = finder.tokens_of("decoder.0.cross", seen(1, 3))
    assert places(cross.queries) == [[2]]
    assert not cross.is_self
    alone = finder.tokens_of("decoder.1.cross", seen(2, 3))
    assert places(alone.queries) == [[0, 1]]
    assert alone.queries.texts == [["x", "y"]]


def test_tokens_of_another_number_are_refused():
    message = "tokens of batch row 0 must be 3, or 4 with padding, as 'layer' has keys, got 2"
    with pytest.raises(ValueError, match=message):
        TokenFinder(["a", "b"]).tokens_of("layer", seen(4, 4, mask=Padding((3,))))
    with pytest.raises(ValueError, match="one for each of the 3 batch rows, got 2"):
        TokenFinder([["a"], ["b"]]).tokens_of("layer", seen(1, 1, 3))


def test_a_single_query_that_may_be_of_another_text_has_no_position():
    tokens = TokenFinder(None).tokens_of("pool", seen(1, 5))
    assert tokens.keys.select(4).any()
    with pytest.raises(ValueError, match="whether the one query of 'pool' is a token of a generation"):
        tokens.queries.select(0)
