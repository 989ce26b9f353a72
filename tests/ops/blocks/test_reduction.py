"""Gradients gathered block by block."""

import pytest
import torch

import regard as R
from regard import Causal, Entmax, Global, SinkSoftmax, Softmax, Sparsemax, Weights, Window, attend, weights
from regard.ops.blocks import prepared_call

close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    for name, value in (("ROWS_PER_BLOCK", 4), ("KEYS_PER_TILE", 4), ("SCORES_PER_BLOCK", 2**6)):
        monkeypatch.setattr(prepared_call, name, value)


ASKED = {
    "product": lambda A: A @ torch.linspace(-1, 1, A.shape[-1]).double()[:, None],
    "transposed product": lambda A: A.T @ torch.linspace(-1, 1, A.shape[-2]).double()[:, None],
    "tile": lambda A: A[..., 2:9, ::3],
    "entropy": Weights.entropy,
    "received": Weights.received,
    "logit": Weights.logit,
    "selection": lambda A: A.select(batch=0, heads=[1]).entropy(),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("normalize", [Softmax(), SinkSoftmax(0.3), Sparsemax(), Entmax(1.4)], ids=repr)
def test_a_statistic_that_is_known_already_changes_no_gradient(normalize, asked):
    q, k = torch.randn(2, 1, 2, 13, 3).double().requires_grad_().unbind(0)
    gradients = []
    for known in (False, True):
        A = weights(q, k, mask=Causal(), normalize=normalize, backend="tiled")
        if known:
            assert A.statistic is not None
        gradients.append(torch.autograd.grad(ASKED[asked](A).sin().sum(), (q, k)))
    assert all(x.any() for x in gradients[0])
    close(*gradients)


def test_the_gradient_of_a_half_precision_factor_is_summed_in_float32():
    torch.manual_seed(0)
    tensors = *torch.randn(2, 1, 1, 500, 4), torch.randn(1, 1, 500, 2), torch.randn(1, 8)
    half = [x.bfloat16().requires_grad_() for x in tensors]
    full = [x.detach().double().requires_grad_() for x in half]
    ours, exact = (
        torch.autograd.grad(attend(q, k, v, bias=R.Relative.t5(table, 16), backend="tiled").double().sum(), (v, table))
        for q, k, v, table in (half, full)
    )
    for found, want in zip(ours, exact, strict=True):
        # Rounded in its block and once at the end; the sum of 125 blocks in half precision is far worse.
        assert (found.double() - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_gradient_of_a_shared_key_head_is_the_sum_over_its_query_heads(heads):
    q, k, v = torch.randn(2, 4, 9, 3).double(), *torch.randn(2, 2, heads, 11, 3).double()
    shared = [x.requires_grad_() for x in (k, v)]
    repeated = [x.detach().repeat_interleave(4 // heads, 1).requires_grad_() for x in (k, v)]
    few = torch.autograd.grad(attend(q, *shared, mask=Causal(), backend="tiled").sin().sum(), shared)
    many = torch.autograd.grad(attend(q, *repeated, mask=Causal(), backend="tiled").sin().sum(), repeated)
    close(few, tuple(x.unflatten(1, (heads, -1)).sum(2) for x in many))


@pytest.mark.parametrize("mask", [None, Causal(), Window(2) | Global((0, 9))], ids=repr)
def test_the_gradient_of_keys_and_values_is_the_sum_over_queries(mask):
    q, k, v = torch.randn(3, 1, 2, 13, 3).double()
    shared = [x.requires_grad_() for x in (k, v)]
    together = torch.autograd.grad(attend(q, k, v, mask=mask, backend="tiled").sin().sum(), shared)
    apart = [attend(q[:, :, [r]], k, v, mask=mask, offset=r, backend="tiled").sin().sum() for r in range(13)]
    each = [torch.autograd.grad(out, shared) for out in apart]
    close(together, tuple(sum(x) for x in zip(*each, strict=True)))


def by_hand(q, k, hidden):
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    return s.masked_fill(hidden, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(30, 30), (30, 4)])
def test_the_log_sum_exp_of_rows_has_a_gradient(lengths, causal, backend):
    q, k = torch.randn(2, 4, 20, 8, dtype=torch.float64), torch.randn(2, 2, 30, 8, dtype=torch.float64)
    q.requires_grad_(), k.requires_grad_()
    mask = R.Padding(lengths) & R.Causal() if causal else R.Padding(lengths)
    lse = weights(q, k, mask=mask, backend=backend).lse
    away = torch.arange(10, 30)[:, None] - torch.arange(30)
    hidden = (away < 0 if causal else away < -30).expand(2, 1, 20, 30).clone()
    hidden[1, :, :, lengths[1] :] = True
    want = by_hand(q, k, hidden)
    torch.testing.assert_close(lse, want)
    weight = torch.randn_like(want)
    got, exact = (torch.autograd.grad((x * weight).sum(), (q, k)) for x in (lse, want))
    torch.testing.assert_close(got, exact)


def test_rows_that_see_nothing_have_no_sum_and_no_gradient():
    q, k = torch.randn(1, 2, 90, 8, requires_grad=True), torch.randn(1, 2, 90, 8)
    seen = torch.ones(90, 90, dtype=torch.bool)
    seen[20:70] = False
    lse = weights(q, k, mask=R.Dense(seen)).lse
    assert lse[:, :, 20:70].eq(-torch.inf).all()
    assert torch.equal(lse.detach(), weights(q.detach(), k, mask=R.Dense(seen)).lse)
    (grad,) = torch.autograd.grad(lse[:, :, :20].sum() + lse[:, :, 70:].sum(), q)
    assert grad[:, :, 20:70].eq(0).all()
    assert grad[:, :, :20].ne(0).all()


def test_parts_that_are_merged_have_the_gradient_of_the_whole():
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    parts = [weights(q, k[:, :, cut]) for cut in (slice(0, 17), slice(17, 40))]
    share = torch.softmax(torch.stack([A.lse for A in parts]), 0)[..., None]
    merged = share[0] * (parts[0] @ v[:, :, :17]) + share[1] * (parts[1] @ v[:, :, 17:])
    whole = weights(q, k) @ v
    torch.testing.assert_close(merged, whole)
    got, want = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (merged, whole))
    torch.testing.assert_close(got, want)


def test_dropout_is_drawn_for_every_row_and_head():
    b, h, n = 3, 4, 40
    q, v = torch.zeros(b, h, n, 1), torch.randn(n, 2).expand(b, h, n, 2)
    out = attend(q, q, v, dropout=0.5, backend="tiled").flatten(0, 1)
    same = (out[:, None] == out).all(-1).float().mean(-1)
    assert torch.equal(same, torch.eye(b * h))


def total_entropy(q, k, v, **terms):
    return weights(q, k, **terms).entropy().sum() + v.sum() * 0


@pytest.mark.parametrize("ask", [attend, total_entropy])
@pytest.mark.parametrize("shape", [(2, 2, 5, 4), (0, 2, 5, 4), (2, 2, 0, 4)])
def test_what_nobody_sees_has_gradients_of_zero(ask, shape):
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = ask(q, k, v, mask=R.Padding((0,) * shape[0]), backend="tiled")
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


def test_a_row_that_sees_no_key_passes_no_gradient_to_its_logit():
    q, k = torch.randn(2, 1, 2, 13, 3).double().requires_grad_().unbind(0)
    for backend in ("tiled", "reference"):
        A = weights(q, k, mask=Causal(), offset=-4, backend=backend)
        logits = A.logit()
        assert logits[..., :4].isneginf().all()
        dq, dk = torch.autograd.grad(torch.where(logits == -torch.inf, 0.0, logits).sum() + 0 * A.max().sum(), (q, k))
        assert not dq[..., :4, :].any()
        assert dq[..., 4:, :].any()
        assert dk.isfinite().all()
