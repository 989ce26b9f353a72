"""attend and weights: the operator, and what it leaves for later questions."""

from __future__ import annotations

import torch

import regard as R
from regard import attend


def test_the_first_product_leaves_its_statistic_for_every_later_question(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    A = R.weights(q, k, mask=R.Causal())
    out = A @ v
    torch.testing.assert_close(out, attend(q, k, v, mask=R.Causal()))
    torch.testing.assert_close(A._statistic.squeeze(-1), R.weights(q, k, mask=R.Causal()).lse)
    monkeypatch.setattr(R.Softmax, "weigh", None)  # nobody needs to normalize again
    summary = A.summary()
    torch.testing.assert_close(summary.received, A.received())
    torch.testing.assert_close(A[..., 7, :].sum(-1), torch.ones(1, 2))
