"""Padding: sequences of a batch become one tensor, filled on the right."""

import numpy as np
import pytest
import torch

from regard.data import Batches
from regard.data.padding import collate, pad


@pytest.mark.parametrize("turned", [False, True])
def test_a_batch_keeps_fractions_whichever_example_comes_first(turned):
    some = [{"a": [1, 2], "y": 1}, {"a": [1.5, 2.5, 3.75], "y": 0.5}, {"a": [], "y": 3}]
    some = some[::-1] if turned else some
    batch = next(iter(Batches(some, rows=3, seed=None)))
    assert batch["a"].dtype == batch["y"].dtype == torch.float32
    assert batch["a"].tolist() == [[*one["a"], 0, 0, 0][:3] for one in some]
    assert batch["y"].tolist() == [one["y"] for one in some]


def test_whole_numbers_beside_an_empty_row_stay_whole():
    batch = next(iter(Batches([{"a": []}, {"a": [2**53 + 1]}], rows=2, seed=None)))
    assert batch["a"].tolist() == [[0], [2**53 + 1]]


def test_padding_is_on_the_right_with_the_value_asked_for():
    assert pad([np.array([1]), np.array([2, 3])], 9).tolist() == [[1, 9], [2, 3]]
    assert pad([]).shape == (0, 0)
    batch = collate([{"a": np.array(x), "b": np.array(x)} for x in ([1], [2, 3])], {"b": 9})
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([[1, 0], [2, 3]], [[1, 9], [2, 3]])
    batch = collate([{"x": np.ones((2, 3))}, {"x": np.zeros((2, 3))}], {})
    assert batch["x"].shape == (2, 2, 3)
    with pytest.raises(
        ValueError, match=r"the field 'x' must have one shape in a batch, got \(2, 3\) and \(3, 3\); scale"
    ):
        collate([{"x": np.ones((2, 3))}, {"x": np.ones((3, 3))}], {})
