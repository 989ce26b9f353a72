"""The entries of a tile that a thread holds: every entry with one thread, neighbours together, sums over them."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.summary import thread_layout
from tests.kernels.plain_python import plain_python, tile

plain = plain_python(thread_layout)
SIZES = [(32, 32, 4), (64, 64, 4), (128, 64, 8), (64, 128, 8), (16, 16, 1)]  # queries, keys, warps


@pytest.mark.parametrize(("I", "J", "warps"), SIZES)
def test_each_key_is_computed_in_one_row_of_the_product(I, J, warps):
    assert sorted(plain.key_order(J, warps).tolist()) == list(range(J))


@pytest.mark.parametrize(("I", "J", "warps"), SIZES)
def test_a_thread_holds_neighbouring_keys_and_threads_follow_each_other(I, J, warps):
    threads = 8 * min(warps, J // 16)
    keys = plain.key_order(J, warps)[:, None].expand(J, I)
    held = plain.keys_by_thread(keys, I, J, warps)
    assert torch.equal(held, torch.arange(J).view(threads, 1, -1).expand(threads, I, -1))


@pytest.mark.parametrize(("I", "J", "warps"), SIZES)
def test_the_queries_of_a_key_stay_with_it(I, J, warps):
    queries = tile(torch.arange(I)).expand(J, I)
    held = plain.keys_by_thread(queries, I, J, warps)
    assert (held == torch.arange(I)[:, None]).all()


@pytest.mark.parametrize(("I", "bins"), [(32, 1), (32, 4), (64, 2), (128, 16)])
def test_each_of_four_threads_holds_every_fourth_pair_of_the_queries_of_a_bin(I, bins):
    held = plain.queries_by_thread(tile(torch.arange(I)).expand(16, I), I, 16, bins)
    assert held.shape == (16, bins, 4, I // bins // 4)
    assert torch.equal(held.flatten(1).sort(1).values, torch.arange(I).expand(16, I))
    for part in range(bins):
        for thread in range(4):
            mine = held[0, part, thread].tolist()
            assert {query * bins // I for query in mine} == {part}
            assert {query // 2 % 4 for query in mine} == {thread}


@pytest.mark.parametrize("n", [1, 2, 8])
def test_sums_and_maxima_run_over_what_a_thread_holds(n):
    x, y, start = tile(torch.randn(3, 5, n)), tile(torch.randn(3, 5, n)), tile(torch.randn(3, 5))
    torch.testing.assert_close(plain.add_products(start, x, y, n), start + (x * y).sum(-1))
    assert torch.equal(plain.running_max(start, x, n), torch.maximum(start, x.amax(-1)))
