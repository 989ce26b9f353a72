"""Sizes in bytes, and answers that are refused because they take more."""

from __future__ import annotations

import pytest
import torch

from regard import Weights, weights
from regard.ops.memory_limit import LIMIT, check_fits, format_size, parse_size

B, H, I, J = 2, 3, 5, 7


def small():
    return weights(torch.randn(B, H, I, 4).double(), torch.randn(B, H, J, 4).double())


class TestLimit:
    def test_past_it_the_error_says_what_to_do(self):
        q, k = torch.zeros(1, 1, 40_000, 1), torch.zeros(1, 1, 40_000, 1)
        for ask in (Weights.dense, lambda A: A[...], lambda A: A.T.dense(), lambda A: A.T[...]):
            with pytest.raises(ValueError, match=r"takes 6\.4 GB, more than limit='1GB'; ask for a tile.*A\.pool"):
                ask(weights(q, k))

    def test_it_counts_bytes(self):
        A = small()
        need = B * H * I * J * 8
        assert A.dense(limit=f"{need}B").shape == A.shape
        assert A.T.dense(limit=f"{need / 1000} kb").shape == A.T.shape
        for ask in (A.dense, A.T.dense):
            with pytest.raises(ValueError, match="more than limit"):
                ask(limit=f"{need - 1}B")

    @pytest.mark.parametrize("limit", ["much", "GB", "3", "1 PB", ""])
    def test_what_is_no_size_is_refused(self, limit):
        with pytest.raises(ValueError, match="a size must be a number with KB, MB, GB or TB"):
            small().dense(limit=limit)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512 * 10**6), ("1.5GB", 15 * 10**8), ("100KB", 10**5), ("7b", 7), (" 2 tb ", 2 * 10**12), ("0B", 0)],
)
def test_a_size_is_its_number_of_bytes_in_powers_of_a_thousand(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["infGB", "1e999B", "nanMB", "1 000KB", "GBKB"])
def test_a_number_that_is_none_is_no_size(text):
    with pytest.raises(ValueError, match=f"such as '1GB', got '{text}'"):
        parse_size(text)


def test_what_fills_the_limit_fits_and_a_byte_more_does_not():
    n = parse_size(LIMIT) // 4
    check_fits("the map", n, torch.float32)
    with pytest.raises(ValueError, match="the map takes 1 GB, more than limit='1GB'; ask for a tile"):
        check_fits("the map", n + 1, torch.float32)
    check_fits("the map", n + 1, torch.float16)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (2, "2 B"), (30_200, "30.2 kB"), (999_700, "1 MB"), (4.66e6, "4.66 MB"), (3.2e12, "3.2 TB")],
)
def test_a_size_is_printed_in_a_unit_that_fits(count, text):
    assert format_size(count) == text
    assert abs(parse_size(text) - count) <= 0.005 * count


def test_other_units_take_the_same_prefixes():
    assert format_size(134e6, "FLOP") == "134 MFLOP"
