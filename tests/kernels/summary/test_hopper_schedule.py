"""Blocks of rows dealt out to programs: each portion of each block once, and all processors done together."""

from __future__ import annotations

import heapq

import pytest

from regard.kernels.summary.hopper_schedule import split_causal_blocks, split_even_blocks


def rounds(lengths, at_once):
    """How long it takes if whoever is done takes the next."""
    ends = [0.0] * at_once
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def portions(split, blocks):
    """By block, how many programs share its keys."""
    return (
        [split.to_first] * split.first
        + [split.to_second] * split.second
        + [split.to_rest] * (blocks - split.first - split.second)
    )


@pytest.mark.parametrize("at_once", [264, 396])
@pytest.mark.parametrize("blocks", [1, 16, 256, 264, 395, 396, 400, 512, 1024, 2048, 8192])
def test_split_even_blocks_covers_all_blocks_and_processors_finish_together(blocks, at_once):
    split = split_even_blocks(blocks, at_once)
    shared = portions(split, blocks)
    assert len(shared) == blocks
    assert sum(shared) == split.programs(blocks)
    taken = rounds([1 / of for of in shared for _ in range(of)], at_once)
    assert blocks / at_once <= taken <= blocks / at_once + 1 / 4


@pytest.mark.parametrize(("blocks", "at_once", "places"), [(512, 396, 32), (256, 396, 16), (128, 264, 8), (3, 396, 3)])
def test_split_causal_blocks_shares_the_longest_blocks(blocks, at_once, places):
    split = split_causal_blocks(blocks, at_once, places)
    shared = portions(split, blocks)
    assert len(shared) == blocks
    assert sum(shared) == split.programs(blocks)
    lengths = [2 * (places - n * places // blocks) for n in range(blocks)]  # in tiles, the longest first
    apart = [length / of for length, of in zip(lengths, shared, strict=True) for _ in range(of)]
    assert split.to_first == 1 or lengths[0] / split.to_first >= 8
    assert rounds(apart, at_once) <= rounds(lengths, at_once)
    if blocks > 100:
        assert rounds(apart, at_once) < 0.85 * rounds(lengths, at_once)
