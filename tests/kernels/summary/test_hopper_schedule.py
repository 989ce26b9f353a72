"""Blocks of rows dealt out to programs: each portion of each block once, and all processors done together."""

from __future__ import annotations

import heapq

import pytest
import torch

from regard.kernels.summary import hopper_schedule
from regard.kernels.summary.hopper_schedule import WorkSplit, split_causal_blocks, split_even_blocks
from tests.kernels.plain_python import plain_python

plain = plain_python(hopper_schedule, unsigned_divmod=divmod)


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


@pytest.mark.parametrize("split", [WorkSplit(5, 1, 0, 1, 1), WorkSplit(3, 1, 2, 4, 2), WorkSplit(2, 3, 2, 2, 1)])
@pytest.mark.parametrize("blocks", [5, 8])
def test_each_portion_of_each_block_goes_to_one_program(split, blocks):
    dealt = [plain.block_of_program(program, split) for program in range(split.programs(blocks))]
    want = [(block, portion, of) for block, of in enumerate(portions(split, blocks)) for portion in range(of)]
    assert [tuple(int(x) for x in one) for one in dealt] == want


@pytest.mark.parametrize(("programs", "processors"), [(12, 4), (14, 4), (3, 4), (9, 1), (0, 4)])
def test_every_second_wave_of_programs_runs_backwards(programs, processors):
    order = [int(plain.serpentine_order(n, programs, processors)) for n in range(programs)]
    waves = [list(range(n, min(n + processors, programs))) for n in range(0, programs, processors)]
    assert order == [x for n, wave in enumerate(waves) for x in (reversed(wave) if n % 2 else wave)]


@pytest.mark.parametrize(("x", "y"), [(0, 1), (7, 1), (7, 2), (6, 3), (2**31 - 1, 7)])
def test_quotient_and_remainder_are_those_of_python(x, y):
    quotient, remainder = plain_python(hopper_schedule).unsigned_divmod(torch.tensor(x), y)
    assert (int(quotient), int(remainder)) == divmod(x, y)


def test_blocks_that_fill_the_last_wave_are_left_whole():
    assert split_even_blocks(400, 200) == WorkSplit(400, 1, 0, 1, 1)
    assert split_even_blocks(390, 200) == WorkSplit(390, 1, 0, 1, 1)
    assert split_even_blocks(250, 200).first == 200
