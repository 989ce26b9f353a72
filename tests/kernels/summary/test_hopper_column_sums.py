"""Sums over the rows of a tile reach the received mass of their keys and the cells of a map, each once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from regard.kernels.summary import hopper_column_sums, hopper_thread_layout
from regard.kernels.summary.hopper_column_sums import ColumnSums, MapCells, cells_fit_in_warp
from tests.kernels.plain_python import Memory, plain_python, tile

threads = plain_python(hopper_thread_layout)
BLOCK, KEYS = 128, 64


def sums_of(weights):
    """`4 warps, 8 threads, 64 keys`: the weights of 128 rows and 64 keys, summed over the rows that a thread holds."""
    parts = [tile(weights[threads.row_in_block(part, torch.arange(64))]) for part in (0, 1)]
    return sum(threads.sum_row_pairs(part) for part in parts)


def add(weights, place, start, height, width, map_shape=None, share=1.0):
    """The received mass of 256 keys, and the map, after one tile."""
    rows, cols = map_shape or (1, 1)
    # One memory for both: the map lies behind the received mass.
    memory = Memory(256 + rows * cols)
    plain = plain_python(hopper_column_sums, memory, cells_fit_in_warp=cells_fit_in_warp)
    stored = SimpleNamespace(load=lambda layout: sums_of(weights))
    sums = ColumnSums(stored, torch.tensor(start))
    cells = MapCells(None if map_shape is None else 256, rows, cols, share)
    plain.add_column_sums(sums, place, received=0, cells=cells, HEIGHT=height, WIDTH=width)
    return memory.values[:256], memory.values[256:].view(rows, cols)


@pytest.mark.parametrize("start", [0, 128])
def test_received_mass_is_the_sum_over_all_128_rows(start):
    weights = torch.rand(BLOCK, KEYS)
    received, _ = add(weights, 0, start, 32, 64)
    want = torch.zeros(256)
    want[start : start + KEYS] = weights.sum(0)
    torch.testing.assert_close(received, want)


@pytest.mark.parametrize("height", [8, 16, 32, 64, 128, 512])
@pytest.mark.parametrize("width", [8, 16, 64, 256])
@pytest.mark.parametrize(("place", "start"), [(0, 0), (3, 64)])
def test_each_cell_of_a_map_is_the_sum_of_its_entries(place, start, height, width):
    weights, rows, cols = torch.rand(BLOCK, KEYS), 512 // height, max(1, 256 // width)
    received, cells = add(weights, place, start, height, width, (rows, cols), share=0.25)
    want = torch.zeros(512, 256)
    want[place * BLOCK : (place + 1) * BLOCK, start : start + KEYS] = weights
    by_cell = want.view(rows, 512 // rows, cols, 256 // cols).sum((1, 3))
    torch.testing.assert_close(cells, by_cell / 4)
    torch.testing.assert_close(received[start : start + KEYS], weights.sum(0))


def test_rows_past_the_end_of_a_map_of_small_cells_are_not_stored():
    weights = torch.rand(BLOCK, KEYS)
    weights[40:] = 0.0  # 40 queries: 5 rows of cells
    _, cells = add(weights, 0, 0, 8, 8, (5, 8))
    torch.testing.assert_close(cells, weights[:40].view(5, 8, 8, 8).sum((1, 3)))


@pytest.mark.parametrize(
    ("height", "width", "fits"), [(8, 8, True), (32, 64, True), (64, 8, False), (8, 128, False), (33, 64, False)]
)
def test_a_warp_holds_32_rows_and_64_keys(height, width, fits):
    assert cells_fit_in_warp(height, width) is fits


@pytest.mark.parametrize(("height", "place", "first"), [(8, 0, 3), (16, 1, 0), (32, 0, 70)])
def test_cells_of_keys_that_no_row_sees_are_cleared_and_no_others(height, place, first):
    rows, cols = 13, 70
    memory = Memory(rows * cols, fill=1.0)
    plain_python(hopper_column_sums, memory).clear_cells(place, first, MapCells(0, rows, cols, 1.0), height)
    want = torch.ones(rows, cols)
    want[place * 128 // height : (place + 1) * 128 // height, first:] = 0.0
    assert torch.equal(memory.values.view(rows, cols), want)
