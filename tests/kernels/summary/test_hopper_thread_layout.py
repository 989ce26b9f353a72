"""The entries of a 64 x 64 product that a thread of the Hopper kernel holds, and sums over them."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.summary import hopper_thread_layout
from tests.kernels.plain_python import plain_python, tile

plain = plain_python(hopper_thread_layout)
ROWS = torch.arange(64)  # of the product, one part of a block of 128 rows


def rows_of_threads() -> torch.Tensor:
    """`part 64`: the row of the block in each row of the product."""
    return torch.stack([plain.row_in_block(part, ROWS) for part in (0, 1)])


def test_the_two_parts_hold_each_of_the_128_rows_once():
    assert sorted(rows_of_threads().flatten().tolist()) == list(range(128))


def test_a_thread_holds_four_of_eight_neighbouring_rows_two_apart():
    by_thread = rows_of_threads().view(2, 4, 2, 8).permute(1, 3, 0, 2).flatten(2)  # warps, threads, their four rows
    for warp in range(4):
        for thread in range(8):
            rows = sorted(by_thread[warp, thread].tolist())
            assert [row - rows[0] for row in rows] == [0, 2, 4, 6]
            assert {row // 8 for row in rows} == {warp * 4 + thread // 2}
            assert plain.first_row_of_thread(torch.tensor(warp * 16 + thread)) == rows[0]


def test_keys_are_grouped_by_every_fourth_pair_and_back():
    x = tile(torch.arange(64 * 64).view(64, 64))
    held = plain.keys_by_thread(x)
    assert held.shape == (64, 4, 16)
    for thread in range(4):
        assert set((held[5, thread] % 64 // 2 % 4).tolist()) == {thread}
    assert torch.equal(plain.tile_from_threads(held), x)


@pytest.mark.parametrize("n", [1, 2, 16])
def test_sums_and_maxima_run_over_the_keys_of_a_thread(n):
    x, y, start = tile(torch.randn(64, 4, n)), tile(torch.randn(64, 4, n)), tile(torch.randn(64, 4))
    torch.testing.assert_close(plain.add_products(start, x, y, n), start + (x * y).sum(-1))
    assert torch.equal(plain.running_max(start, x, n), torch.maximum(start, x.amax(-1)))
    assert torch.equal(plain.first_of_last_dim(x, n), x[..., 0])


def test_the_two_rows_of_a_thread_are_added():
    x = tile(torch.randn(64, 64))
    pairs = x.view(4, 2, 8, 64)  # rows of a product 8 apart
    assert torch.equal(plain.sum_row_pairs(x), pairs[:, 0] + pairs[:, 1])
