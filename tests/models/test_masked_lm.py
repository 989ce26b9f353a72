"""Masks over tokens, for training a masked language model."""

from __future__ import annotations

import pytest
import torch

from regard.models import mask_words


def test_masking_follows_the_shares_of_the_paper():
    ids = torch.randint(0, 1000, (200, 200))
    read, targets = mask_words(ids, mask=999, vocabulary=1000, special=(0, 1, 2, 999))
    asked = targets >= 0
    assert not torch.isin(targets[asked], torch.tensor([0, 1, 2, 999])).any()
    assert torch.equal(targets[asked], ids[asked])
    assert torch.equal(read[~asked], ids[~asked])
    share = asked.sum() / (~torch.isin(ids, torch.tensor([0, 1, 2, 999]))).sum()
    assert share == pytest.approx(0.15, abs=0.01)
    masked, kept = (read[asked] == 999).double().mean(), (read[asked] == ids[asked]).double().mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    again = [mask_words(ids, mask=999, vocabulary=1000, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(again[0][0], again[1][0])
    assert torch.equal(again[0][1], again[1][1])
