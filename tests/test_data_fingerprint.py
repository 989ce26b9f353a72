"""Fingerprints of data in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from regard.data_fingerprint import MAX_ITEMS, data_fingerprint


@dataclass
class Example:
    ids: list[int]
    name: str


DATA = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(3, 2),
    torch.arange(6).to(torch.bfloat16),
    torch.tensor(3.0),
    torch.empty(0),
    np.arange(5),
    np.float64(3.0),
    {"x": torch.ones(2), "y": 1},
    {"x": torch.ones(2), "z": 1},
    (1, 2),
    [1, [2]],
    [[1, 2]],
    "text",
    b"bytes",
    None,
    True,
    1,
    Example([1], "a"),
    Example([1], "b"),
    "\ud800",
]


def test_same_data_has_the_same_fingerprint_and_other_data_another():
    found = [data_fingerprint([item]) for item in DATA]
    assert found == [data_fingerprint([item]) for item in DATA]
    assert len(set(found)) == len(DATA)
    assert data_fingerprint([1, 2]) != data_fingerprint([2, 1]) != data_fingerprint([2, 1, 1])


def test_layout_in_memory_does_not_matter():
    x = torch.randn(4, 6)
    assert data_fingerprint([x]) == data_fingerprint([x.T.contiguous().T]) == data_fingerprint([x.requires_grad_()])


@pytest.mark.parametrize("place", [0, -1])
def test_ends_of_large_arrays_are_read(place):
    for x in (torch.zeros(10**6), np.zeros(10**6)):
        before = data_fingerprint([x])
        x[place] = 1
        assert data_fingerprint([x]) != before


def test_some_items_of_long_lists_are_read():
    long = [0] * (3 * MAX_ITEMS + 7)
    before = data_fingerprint(long)
    assert data_fingerprint([*long[:-1], 1]) != before
    assert data_fingerprint([1, *long[1:]]) != before
    assert data_fingerprint([1] * len(long)) != before


def test_sequence_that_may_change_at_each_look_has_none():
    assert data_fingerprint(range(3)) is None
