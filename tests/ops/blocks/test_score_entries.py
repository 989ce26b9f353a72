"""Scores before the normalizer, entry by entry."""

from __future__ import annotations

import pytest
import torch

from regard import Additive, Causal, Padding
from regard.ops.blocks import score_entries as file
from regard.ops.blocks.score_entries import score_entries
from regard.ops.call import Call


@pytest.mark.parametrize("entries", [2**22, 7])
def test_tiles_of_any_size_give_the_same_scores(entries, monkeypatch):
    monkeypatch.setattr(file, "SCORES_PER_TILE", entries)
    q, k = torch.randn(2, 2, 2, 11, 4, dtype=torch.float64)
    u = torch.randn(4, dtype=torch.float64)
    found = score_entries(Call.of(q, k, score=Additive(u), mask=Causal()), torch.tensor([8, 0, 0]))
    want = ((q[:, :, :, None] + k[:, :, None]).tanh() @ u).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found, want[..., [8, 0, 0]])


def test_no_queries_or_no_keys_give_an_empty_tile():
    q, k = torch.randn(1, 2, 0, 4), torch.randn(1, 2, 5, 4)
    assert score_entries(Call.of(q, k), torch.arange(5)).shape == (1, 2, 0, 5)
    assert score_entries(Call.of(k, q), torch.arange(0)).shape == (1, 2, 5, 0)


def test_a_key_of_nan_is_seen_only_where_it_may_be_seen():
    q, k = torch.randn(2, 2, 2, 5, 4)
    k[0, :, 3] = torch.nan
    s = score_entries(Call.of(q, k, mask=Padding(torch.tensor([3, 5]))), torch.arange(5))
    assert s[0, ..., 3:].isneginf().all()
    assert s[0, ..., :3].isfinite().all()
    s = score_entries(Call.of(q, k, mask=Causal()), torch.arange(5))
    assert s[0, ..., 3].isnan().sum() == 2 * 2  # the last two queries of each head
