"""softmax of stored rows, and its gradient, against float64; rows held at once and rows in parts."""

from __future__ import annotations

import pytest
import torch

from regard.kernels import softmax as kernel


@pytest.fixture(params=[4096, 8], ids=["at once", "in parts"])
def longest(request, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_BLOCK", request.param)


@pytest.mark.usefixtures("longest")
@pytest.mark.parametrize("n", [1, 8, 29])
def test_weights_and_log_sum_exp_are_those_of_float64(n, device):
    s = torch.randn(2, 3, 5, n, device=device) * 30 + 100
    A, lse = kernel.softmax(s, torch.float32)
    torch.testing.assert_close(A.double(), s.double().softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), s.double().logsumexp(-1, keepdim=True), atol=1e-5, rtol=1e-6)


@pytest.mark.usefixtures("longest")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_that_of_float64(dtype, device):
    A = torch.randn(2, 3, 5, 29, device=device).softmax(-1).to(dtype)
    dA = torch.randn(2, 3, 29, 5, device=device).to(dtype).mT  # not contiguous
    a, da = A.double(), dA.double()
    want = a * (da - (a * da).sum(-1, keepdim=True))
    torch.testing.assert_close(kernel.softmax_gradient(A, dA).double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("longest")
def test_nan_stays_in_its_row(device):
    s = torch.randn(1, 1, 2, 29, device=device)
    s[0, 0, 0, 20] = float("nan")
    A, lse = kernel.softmax(s, torch.float32)
    assert A[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan().all()
    assert not A[0, 0, 1].isnan().any()
