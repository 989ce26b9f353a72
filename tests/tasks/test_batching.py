"""Batching: sizes that hold together."""

from __future__ import annotations

import pytest

from regard.data import DataError
from regard.tasks import Batching
from regard.tasks.encoded_dataset import EncodedExamples
from regard.train import Group


def over(batching, lengths, said=None):
    examples = EncodedExamples(lengths, lambda some: {"ids": [[1] * n for n in some]})
    say = (lambda line: None) if said is None else said.append
    return batching.over(examples, pad={"ids": 0}, seed=0, group=Group(), say=say)


def test_a_batch_must_hold_the_longest_example():
    with pytest.raises(ValueError, match="must have room for the longest example, got tokens=10 and limit=11"):
        Batching(tokens=10, limit=11)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        Batching(limit=0)


def test_long_examples_are_dropped_truncated_or_an_error_and_counted():
    said = []
    [batch] = over(Batching(tokens=20, limit=5), [3, 9, 5], said)
    assert sorted(batch["ids_lengths"].tolist()) == [3, 5]
    [batch] = over(Batching(tokens=20, limit=5, long="truncate"), [3, 9, 5], said)
    assert sorted(batch["ids_lengths"].tolist()) == [3, 5, 5]
    assert said == [
        "1 of 3 examples have more than 5 tokens and were dropped",
        "1 of 3 examples have more than 5 tokens and were truncated",
    ]
    with pytest.raises(DataError, match=r"example 1: the example has more than 5 tokens \(ids 9\), like 1 of 3 exa"):
        over(Batching(tokens=20, limit=5, long="error"), [3, 9, 5])


def test_nothing_left_is_an_error():
    with pytest.raises(DataError, match="like 2 of 2 examples; raise the limit"):
        over(Batching(tokens=20, limit=5), [8, 9])
    with pytest.raises(DataError, match="there are no examples"):
        over(Batching(), [])
