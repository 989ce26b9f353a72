"""Bins of a map: which queries share a tile, and the slot or part of each."""

from __future__ import annotations

import torch

from regard.kernels.summary.bins import assign_bins
from regard.kernels.tiles import TileConfig


def test_bins_that_do_not_fill_their_eights_are_filled_up():
    ids = (torch.arange(20) * 3 // 20).int()
    bins = assign_bins(ids, torch.zeros(20).int(), (3, 1), TileConfig(16, 32, 4, 2), None, parted=True)
    assert bins.parts == 2
    assert bins.row_order.view(-1, 8).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 20],
        [7, 8, 9, 10, 11, 12, 13, 20],
        [14, 15, 16, 17, 18, 19, 20, 20],
        [20] * 8,
    ]


def test_scattered_bins_are_gathered():
    rows, cols, config = (torch.arange(9) % 2).int(), torch.zeros(9).int(), TileConfig(16, 32, 4, 2)
    parted = assign_bins(rows, cols, (2, 1), config, None, parted=True)
    assert parted.row_order.view(-1, 8).tolist() == [[0, 2, 4, 6, 8, 9, 9, 9], [1, 3, 5, 7, 9, 9, 9, 9]]
    gathered = assign_bins(rows, cols, (2, 1), config, None)
    assert gathered.row_order.tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, *[9] * 7]
    assert gathered.slots.tolist() == [[*[0] * 5, *[1] * 4, *[-1] * 7]]
    assert gathered.owners.tolist() == [[0, 1, *[-1] * 6]]


def test_bins_of_a_tile_have_slots_of_their_own():
    rows = torch.arange(21).int() // 4
    bins = assign_bins(rows, torch.zeros(21).int(), (6, 1), TileConfig(16, 32, 4, 2), None)
    assert bins.row_order is None
    assert bins.slots.tolist() == [[n // 4 for n in range(16)], [0, 0, 0, 0, 1, *[-1] * 11]]
    assert bins.owners.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [4, 5, *[-1] * 6]]
