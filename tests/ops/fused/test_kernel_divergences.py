"""Which pairs of matrices the kernel of divergences compares."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import weights
from regard.ops.blocks import divergences
from regard.ops.fused import kernel_divergences as fused

IDS = torch.arange(12) // 5


def made(device, h=2, grad=False, d=16, dtype=torch.float32, **terms):
    return weights(*torch.randn(2, 1, h, 12, d, device=device, dtype=dtype).requires_grad_(grad).unbind(), **terms)


MASK = R.Documents(IDS)
TAKEN = [
    ({}, {}),
    ({"mask": R.Causal()}, {"mask": R.Causal() & R.Window(3), "offset": -2}),
    ({"mask": MASK}, {"mask": MASK, "bias": R.Alibi(2)}),
    ({"normalize": R.SinkSoftmax(0.0)}, {"h": 1}),
]
LEFT = [
    ({"mask": MASK}, {"mask": R.Documents(IDS)}, "one mask for both sides"),
    ({"mask": MASK}, {"mask": MASK, "offset": 1}, "one mask for both sides"),
    ({"mask": MASK}, {"mask": MASK, "h": 1}, "one mask for both sides"),
    ({"mask": MASK}, {}, "one mask for both sides"),
    ({}, {"normalize": R.Sigmoid()}, "softmax"),
    ({}, {"backend": "tiled"}, "is not the kernel"),
    ({}, {"dtype": torch.float16}, "one dtype"),
    ({"offset": (3,)}, {"offset": (3,)}, "one offset for all batch rows"),
    ({"grad": True, "score": R.Dot(cap=3.0)}, {}, "capped scores"),
    ({}, {"bias": R.Alibi(slopes=torch.ones(2).requires_grad_())}, "a bias or a normalizer"),
]


@pytest.mark.parametrize(("one", "other"), TAKEN, ids=str)
def test_bands_may_differ_and_other_masks_are_shared(one, other, device, monkeypatch):
    A, B = made(device, **one), made(device, **other)
    assert fused.objections(A.call, B.call) == []
    monkeypatch.delattr(divergences, "_forward")
    assert A.kl(B).shape == B.kl(A).shape == (1, 2, 12)


@pytest.mark.parametrize(("one", "other", "reason"), LEFT, ids=[reason for *_, reason in LEFT])
def test_other_pairs_are_compared_block_by_block(one, other, reason, device, monkeypatch):
    A, B = made(device, **one), made(device, **other)
    assert reason in " ".join(fused.objections(A.call, B.call))
    monkeypatch.delattr(fused, "divergence_by_kernel")
    assert A.js(B).shape == (1, 2, 12)


def test_means_of_heads_targets_and_rows_are_compared_block_by_block(device, monkeypatch):
    A, B = made(device), made(device)
    monkeypatch.delattr(fused, "divergence_by_kernel")
    for found in (A.mean_heads().kl(B), A.kl(B.mean_heads()), A.kl(B.dense())):
        assert found.shape == (1, 2, 12)
    assert A.kl(B, rows=[3]).shape == (1, 2, 1)
