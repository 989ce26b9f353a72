"""Rows that begin at different entries of a cache, and texts that follow each other in one row."""

from __future__ import annotations

import pytest
import torch

from regard.nn.row_starts import PackedLengths, RowStarts


def test_what_lies_before_a_row_is_hidden_in_both_forms():
    starts = RowStarts(torch.tensor([0, 3, 1]))
    keep = torch.arange(6) >= torch.tensor([[0], [3], [1]])
    assert starts.padding(0, 6).keys.equal(keep)
    assert starts.padding(2, 3).keys.equal(keep[:, 2:5])
    assert starts.additive_mask(2, 3, torch.float64).exp().bool().equal(keep[:, None, None, 2:5])
    assert starts.additive_mask(0, 50, torch.float32).shape == (3, 1, 1, 50)
    assert starts.padding(3, 4) is starts.additive_mask(3, 4, torch.float32) is None  # these belong to every row
    assert starts.padding(0, 6) is starts.padding(0, 6)


def test_rows_are_selected_once_for_all_layers():
    starts, rows = RowStarts(torch.tensor([0, 3, 1])), torch.tensor([1, 1])
    assert starts.select(rows).numbers == [3, 3]
    assert starts.select(rows) is starts.select(rows)
    assert starts.select(torch.arange(3)) is starts


def test_packed_lengths_count_positions_within_each_text():
    packed = PackedLengths(torch.tensor([2, 0, 3]), width=5)
    assert packed.texts.tolist() == [0, 0, 2, 2, 2]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2]
    assert packed.starts.numbers == [3, 5, 2]
    assert PackedLengths(torch.tensor([2, 0, 3])).starts.numbers == [1, 3, 0]


def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="lengths must be 0 or more, got -1"):
        PackedLengths(torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="width must be 3 or more, got 2"):
        PackedLengths(torch.tensor([3]), width=2)
