"""Tiles: which are visited for a mask, log2 A in one of them, and the sizes and bits that kernels are given."""

from __future__ import annotations

import math

import pytest
import torch

from regard.kernels import tiles
from regard.kernels.tiles import (
    ALL_VISIBLE,
    UNBOUNDED,
    KernelBias,
    Pattern,
    TileConfig,
    TileLists,
    all_lengths,
    dot_precision,
    list_strides,
    next_power_of_two,
    pack_bits,
    padded_width,
    with_contiguous_features,
)
from tests.kernels.plain_python import dialect, plain_python

RANGES = [
    (first, low, high, n)
    for first in (-70, -5, 0, 32, 100)
    for low, high in ((-UNBOUNDED, UNBOUNDED), (0, UNBOUNDED), (0, 20), (-9, 9), (3, 70), (0, 0), (5, 4))
    for n in (0, 1, 40, 150)
]


@pytest.mark.parametrize(("first", "low", "high", "n"), RANGES)
def test_the_ranges_of_tiles_are_those_of_the_mask_written_out(first, low, high, n):
    J, last = 16, first + 31
    plain = plain_python(tiles)
    start, stop, full_start, full_stop, crossing, crossed = (
        int(x) for x in plain.visible_tiles(first, last, low, high, n, J)
    )
    assert start <= full_start <= crossing <= crossed <= full_stop <= stop
    for t in range(-(-n // J) + 2):
        keys = range(t * J, (t + 1) * J)
        seen = [low <= i - j <= high and j < n for i in range(first, last + 1) for j in keys]
        if any(seen):
            assert start <= t < stop
        if full_start <= t < full_stop:
            assert all(seen)
            on_diagonal = any(first <= j <= last for j in keys) and last >= 0
            assert (crossing <= t < crossed) or not on_diagonal


def log2_weights(s, lse, **given):
    """log2 A of a tile of all rows and keys, by the kernel's code."""
    n_i, n_j = s.shape
    words = dialect()
    words.abs, words.exp2 = torch.abs, torch.exp2
    words.load = lambda at, mask=None, other=None: given["values"].flatten()[at]
    words.PropagateNan = torch
    words.PropagateNan.ALL = None
    words.maximum = lambda x, y, propagate_nan=None: torch.maximum(x, torch.tensor(y))
    words.static_range = range
    numbers = {name: getattr(tiles, name).value for name in ("LOG2E", "LN2", "LOG2_ZERO")}
    plain = plain_python(tiles, tl=words, **numbers)
    row, col = torch.arange(n_i)[:, None], torch.arange(n_j)[None]
    return plain.log2_weights(
        s, lse[:, None] / math.log(2), row, col, given.get("offset", 0), given.get("scale", 1.0), given.get("slope"),
        given.get("BIAS"), n_j, 1, n_i, given.get("length", n_j), given.get("low", -UNBOUNDED), UNBOUNDED, None,
        row, col, n_j, given.get("cap"), given.get("careful", False),
    )  # fmt: skip


def test_log2_weights_are_the_scaled_products_less_the_log_sum_exp():
    s, lse = torch.randn(5, 7), torch.randn(5)
    torch.testing.assert_close(log2_weights(s, lse, scale=0.5), (s / 2 - lse[:, None]) / math.log(2))


def test_a_cap_a_slope_and_values_are_those_of_the_definition():
    s, lse, values = torch.randn(5, 7) * 9, torch.randn(5), torch.randn(5, 7)
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    want = torch.tanh(s / 3) * 3 - 0.25 * distance + values - lse[:, None]
    got = log2_weights(s, lse, cap=3.0, slope=0.25, offset=2, BIAS=0, values=values)
    torch.testing.assert_close(got, want / math.log(2), atol=1e-5, rtol=1e-5)


def test_only_careful_tiles_hide_entries_and_a_hidden_weight_is_exactly_zero():
    s, lse = torch.zeros(4, 6), torch.zeros(4)
    seen = (torch.arange(4)[:, None] + 1 >= torch.arange(6)) & (torch.arange(6) < 4)
    got = log2_weights(s, lse, low=0, length=4, offset=1, careful=True)
    assert torch.equal(got.exp2() > 0, seen)
    assert (got * got.exp2()).isfinite().all(), "0 times log2 of 0 is a number"
    assert (log2_weights(s, lse, low=0, length=4, offset=1).exp2() == 1).all()


@pytest.mark.parametrize(
    ("config", "threads", "sides", "run"),
    [
        (TileConfig(64, 64, 4, 2), 32, 1, 16),
        (TileConfig(128, 32, 4, 2), 16, 2, 16),
        (TileConfig(16, 32, 4, 2), 16, 2, 16),
        (TileConfig(64, 128, 8, 3), 64, 1, 16),
        (TileConfig(64, 128, 4, 3), 32, 1, 32),
    ],
)
def test_threads_share_the_keys_of_a_row_and_warps_beyond_them_take_other_rows(config, threads, sides, run):
    assert (config.threads, config.sides, config.run) == (threads, sides, run)
    assert config.run * config.threads == config.cols * 8


def test_bits_are_packed_lowest_first():
    seen = torch.rand(3, 5, 64) < 0.5
    words = pack_bits(seen)
    assert words.dtype == torch.int32
    assert torch.equal((words[..., None] >> torch.arange(32) & 1).flatten(-2).bool(), seen)


def test_strides_of_lists_are_zero_where_a_dim_broadcasts():
    assert list_strides(torch.zeros(2, 3, 4, 5)) == (60, 20, 5)
    assert list_strides(torch.zeros(1, 3, 4, 5)) == (0, 20, 5)
    assert list_strides(torch.zeros(2, 1, 4, 5)) == (20, 0, 5)


@pytest.mark.parametrize(
    ("n", "power", "width"), [(0, 1, 16), (1, 1, 16), (3, 4, 16), (16, 16, 16), (17, 32, 32), (111, 128, 128)]
)
def test_widths_are_padded_to_powers_of_two(n, power, width):
    assert next_power_of_two(n) == power
    assert padded_width(n) == width


def test_features_are_copied_only_where_they_lie_apart():
    x = torch.randn(3, 4, 5)
    assert with_contiguous_features(x) is x
    assert with_contiguous_features(x.transpose(0, 1)).data_ptr() == x.data_ptr()
    apart = with_contiguous_features(x.mT)
    assert apart.stride(-1) == 1
    assert torch.equal(apart, x.mT)


def test_batch_rows_of_a_pattern_keep_what_they_share():
    each, shared = torch.arange(6).view(3, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    lists = TileLists(each[..., 0], each, shared[..., 0], shared, shared, torch.zeros(4, 2, 1))
    part = Pattern(low=1, lengths=torch.tensor([5, 6, 7]), lists=lists).for_batch(slice(1, 2))
    assert part.low == 1
    assert part.lengths.tolist() == [6]
    assert part.lists.full.flatten().tolist() == [2, 3]
    assert part.lists.part is shared
    assert part.lists.bits is lists.bits
    assert ALL_VISIBLE.for_batch(slice(0, 1)) == ALL_VISIBLE


def test_batch_rows_of_a_bias_are_those_of_its_values():
    values = torch.arange(6.0).view(3, 1, 1, 2)
    assert KernelBias(values=values).for_batch(slice(2, 3)).values.flatten().tolist() == [4, 5]
    table = KernelBias(values=values, steps=(0, 1, 1, -1))  # no batch dim
    assert table.for_batch(slice(2, 3)) is table


def test_float32_is_multiplied_in_three_products_unless_pytorch_allows_one(monkeypatch):
    assert dot_precision(torch.float32) == "tf32x3"
    assert dot_precision(torch.bfloat16) == "tf32"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert dot_precision(torch.float32) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert dot_precision(torch.float32) == "tf32x3"


def test_texts_without_padding_have_the_lengths_of_their_keys():
    found = all_lengths(3, 7, torch.device("cpu"))
    assert found.tolist() == [7, 7, 7]
    assert found is all_lengths(3, 7, torch.device("cpu"))  # made once
    assert not found.is_inference()
