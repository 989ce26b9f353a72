"""Additive scores by the kernel, and their gradients, against tanh in float64."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import attend, explain, weights
from regard.kernels.additive_scores import additive_scores
from regard.ops.backends import triton
from regard.ops.blocks import reduction as rows


def oracle(q, k, u):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    u = u[:, None, None] if u.ndim == 2 else u
    return (torch.tanh(q[:, :, :, None] + k[:, :, None]) * u).sum(-1)


@pytest.mark.interpreter
@pytest.mark.parametrize("per_head", [False, True], ids=["one u", "u per head"])
@pytest.mark.parametrize("spread", [0.5, 7.0, 30.0], ids=["near", "beyond reach", "far"])
@pytest.mark.parametrize(
    ("b", "h", "g", "i", "j", "d"), [(1, 1, 1, 1, 1, 1), (2, 2, 1, 7, 33, 6), (1, 1, 1, 35, 130, 9)]
)
def test_scores_and_gradients_are_those_of_tanh(b, h, g, i, j, d, spread, per_head, device):
    sizes = (b, h, i, d), (b, g, j, d), (h, d) if per_head else (d,)
    leaves = [
        (torch.randn(size, device=device) * scale) for size, scale in zip(sizes, (spread, spread, 1), strict=True)
    ]
    ours = [x.clone().requires_grad_() for x in leaves]
    exact = [x.double().cpu().requires_grad_() for x in leaves]
    plain = [x.clone().cpu().requires_grad_() for x in leaves]
    s, want, eager = additive_scores(*ours), oracle(*exact), oracle(*plain)
    grad = torch.randn_like(want)
    results = [(x, *torch.autograd.grad(x, y, grad.to(x))) for x, y in ((s, ours), (want, exact), (eager, plain))]
    for got, truth, peer in zip(*results, strict=True):
        assert not got.isnan().any()
        floor = 8 * torch.finfo(torch.float32).eps * max(1.0, truth.abs().max().item()) * max(1, d / 4)
        error, allowed = (got.cpu() - truth).abs().max().item(), (peer - truth).abs().max().item()
        assert error <= 3 * allowed + floor, (error, allowed)


@pytest.mark.parametrize("shift", [-1e4, -50.0, 50.0, 1e4, float("inf")])
def test_large_numbers_saturate_as_tanh_does(shift, device):
    q, k = torch.randn(1, 1, 5, 4, device=device), torch.randn(1, 1, 9, 4, device=device)
    q[..., 0] += shift
    k[..., 1] -= shift
    u = torch.randn(4, device=device)
    torch.testing.assert_close(additive_scores(q, k, u), oracle(q, k, u), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("largest", [1.0, 20.0, 1e4])
def test_nan_stays_nan(largest, device):
    q, k, u = (
        torch.randn(1, 1, 5, 4, device=device),
        torch.randn(1, 1, 9, 4, device=device),
        torch.ones(4, device=device),
    )
    q[..., 0, 1], q[..., 1, 2] = float("nan"), largest
    s = additive_scores(q, k, u)
    assert s[:, :, 0].isnan().all()
    assert not s[:, :, 1:].isnan().any()


@pytest.mark.parametrize(
    "mask",
    [None, R.Causal(), R.Padding((20, 7)), R.Causal() & R.Window(5)],
    ids=["plain", "causal", "padded", "window"],
)
def test_additive_attention_and_its_gradients_are_those_of_the_reference(mask, device):
    shapes = (2, 1, 20, 5), (2, 1, 20, 5), (2, 1, 20, 3), (5,)
    leaves = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, want = (
        attend(q, k, v, score=R.Additive(u), mask=mask, backend=backend)
        for (q, k, v, u), backend in ((leaves, "triton"), (exact, "reference"))
    )
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), exact)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("whole", [0, 2**24], ids=["in blocks", "at once"])
def test_grouped_heads_and_half_precision_are_right_whole_and_in_blocks(whole, device, monkeypatch):
    monkeypatch.setattr(triton, "MAX_STORED_SCORES", whole)
    shapes = (2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 3), (4, 5)
    leaves = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, want = (
        attend(q, k, v, score=R.Additive(u), backend=backend)
        for (q, k, v, u), backend in ((leaves, "triton"), (exact, "reference"))
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    grads = torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), exact)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=5e-2, rtol=5e-2)


def test_a_second_derivative_is_refused(device):
    q, k, v = (torch.randn(1, 1, 4, 5, device=device).requires_grad_() for _ in range(3))
    out = attend(q, k, v, score=R.Additive(torch.ones(5, device=device)), backend="triton")
    [first] = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once; pass backend='reference'"):
        first.sum().backward()


def test_additive_attention_uses_the_kernel_by_default(device):
    q, k, v = torch.randn(3, 1, 2, 9, 6, device=device)
    table = explain(q, k, v, score=R.Additive(torch.ones(6, device=device)))
    assert "-> triton     chosen" in table


def test_every_measure_of_additive_weights_is_right(device, monkeypatch):
    monkeypatch.setattr(rows, "additive_scores", None)  # every score comes from the kernel
    q, k, u = (
        torch.randn(1, 2, 9, 6, device=device),
        torch.randn(1, 2, 9, 6, device=device),
        torch.ones(6, device=device),
    )
    A = weights(q, k, score=R.Additive(u))
    exact = weights(q.double(), k.double(), score=R.Additive(u.double()), backend="reference")
    torch.testing.assert_close(A.summary().entropy.double(), exact.entropy(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(A[0, 1, 3].double(), exact[0, 1, 3], atol=1e-5, rtol=1e-5)
