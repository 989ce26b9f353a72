"""The largest weights, from the largest of each run of keys."""

from __future__ import annotations

import pytest
import torch

from regard import weights
from tests.kernels.judged import FEW, TERMS, judged


@pytest.mark.interpreter
@pytest.mark.usefixtures("no_walk")
@pytest.mark.parametrize("terms", [*FEW.values(), *(TERMS[name] for name in ("dense", "alibi", "cap", "t5"))])
def test_topk_equals_topk_of_the_dense_matrix(terms, device, monkeypatch):
    monkeypatch.setattr("regard.ops.fused.topk_entries.STRIP_BYTES", 1)
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    B = exact.dense()
    for count in (1, 2):
        values, keys = (x.cpu() for x in A.topk(count))
        torch.testing.assert_close(values.double(), B.topk(count).values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(B.gather(-1, keys), values.double(), atol=1e-5, rtol=1e-5)
        assert (keys.sort(-1).values.diff() > 0).all()


@pytest.mark.usefixtures("no_walk")
def test_topk_finds_entries_in_one_run_and_in_the_last_run(device):
    q, k = torch.ones(1, 1, 3, 16, device=device), torch.zeros(1, 1, 83, 16, device=device)
    k[:, :, 32:36] = torch.tensor([4.0, 3.0, 2.0, 1.0], device=device)[:, None]
    k[:, :, 82] = 2.5
    found = weights(q, k).topk(5)
    assert found.indices.tolist() == [[[[32, 33, 82, 34, 35]] * 3]]


@pytest.mark.usefixtures("no_walk")
def test_topk_returns_no_key_past_the_end(device):
    q, k = torch.ones(1, 1, 3, 16, device=device), -torch.ones(1, 1, 83, 16, device=device)
    k[:, :, 80:] = torch.tensor([-0.3, -0.2, -0.1], device=device)[:, None]
    assert weights(q, k).topk(4).indices[..., :3].tolist() == [[[[82, 81, 80]] * 3]]
    assert weights(q, k).topk(4).indices.max() < 83
