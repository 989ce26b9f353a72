"""Blocks find what sorting finds."""

from __future__ import annotations

import math

import pytest
import torch

from regard.decode.topk import BLOCK, blockwise_topk


@pytest.mark.parametrize("n", [7, 4 * BLOCK, 33 * BLOCK, 33 * BLOCK + 1, 34 * BLOCK - 1, 5003])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_blocks_find_the_largest(n, k):
    x = torch.randn(5, n)
    values, places = blockwise_topk(x, k)
    assert torch.equal(values, x.topk(k).values)
    assert torch.equal(x.gather(1, places), values)


@pytest.mark.parametrize("at", [0, 1, 127, 128, 4096, 4223, 4224, 4300])
def test_the_largest_may_stand_anywhere(at):
    x = torch.full((2, 4301), -math.inf)
    x[1, at] = -3.0
    assert blockwise_topk(x, 1)[1][1].item() == at


def test_neighbours_and_ties_are_all_found():
    x = torch.zeros(1, 5000)
    x[0, 130:134] = 2.0
    x[0, 4999] = 2.0
    values, places = blockwise_topk(x, 6)
    assert values.tolist() == [[2.0] * 5 + [0.0]]
    assert set(places[0, :5].tolist()) == {130, 131, 132, 133, 4999}
    assert len(set(places[0].tolist())) == 6


def test_a_column_of_strides_is_read_as_it_stands():
    x = torch.randn(5000, 3).T
    assert torch.equal(blockwise_topk(x, 5)[0], x.topk(5).values)


@pytest.mark.parametrize("n", [5, 1000])
def test_a_single_one_is_the_first_of_equal_entries(n):
    x = torch.zeros(2, n)
    x[1, 3:] = 1
    values, places = blockwise_topk(x, 1)
    assert places.tolist() == [[0], [3]] == x.argmax(-1, keepdim=True).tolist()
    assert values.tolist() == [[0.0], [1.0]]
