"""additive_scores: a reciprocal for each pair and feature stands for its tanh, whatever the range and the chunk."""

import pytest
import torch

from regard import Additive, weights
from regard.ops.blocks import additive_blocks
from regard.ops.blocks.additive_blocks import additive_scores

close = torch.testing.assert_close
SIZES = {"one chunk": 2**19, "many chunks": 64, "an entry at a time": 1}


def by_tanh(q, k, u):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    u = u.expand(*q.shape[:2], q.shape[-1])
    return (torch.tanh(q[:, :, :, None] + k[:, :, None]) * u[:, :, None, None]).sum(-1)


def inputs(spread=1.0, dtype=torch.float64):
    q, k = torch.randn(2, 4, 7, 3, dtype=dtype) * spread, torch.randn(2, 2, 9, 3, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, torch.randn(4, 3, dtype=dtype))]


@pytest.mark.parametrize("entries", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("spread", [1.0, 2e3], ids=["by reciprocals", "by tanh"])
def test_scores_and_gradients_are_those_of_a_tanh_for_each_pair(spread, entries, monkeypatch):
    monkeypatch.setattr(additive_blocks, "CHUNK_ENTRIES", entries)
    leaves = inputs(spread)
    found, want = additive_scores(*leaves), by_tanh(*leaves)
    close(found, want)
    weight = torch.randn_like(want)
    close(*(torch.autograd.grad((s * weight).sum(), leaves) for s in (found, want)))


def test_every_head_has_the_same_u_where_u_has_one_dim():
    q, k, u = inputs()
    close(additive_scores(q, k, u[0]), by_tanh(q, k, u[0]))


@pytest.mark.parametrize("far", [15.0, 100.0, 1e4])
def test_float32_scores_of_keys_far_away_are_as_exact_as_by_tanh(far):
    q = torch.linspace(-14.9, 14.9, 31).view(1, 1, 31, 1)
    k, u = torch.linspace(-far, far, 40).view(1, 1, 40, 1), torch.ones(1)
    truth = by_tanh(q.double(), k.double(), u.double())
    error, plain = ((s - truth).abs().max() for s in (additive_scores(q, k, u), by_tanh(q, k, u)))
    assert error <= max(2 * plain, 4 * torch.finfo(torch.float32).eps)


def test_queries_far_from_zero_are_centred():
    q, k = torch.randn(1, 1, 5, 3).double() + 500, torch.randn(1, 1, 6, 3).double() - 500
    close(additive_scores(q, k, torch.ones(3).double()), by_tanh(q, k, torch.ones(3).double()))


@pytest.mark.parametrize(("b", "i", "j"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_scores_of_nothing_are_empty_and_have_gradients_of_zero(b, i, j):
    leaves = [x.requires_grad_() for x in (torch.randn(b, 2, i, 5), torch.randn(b, 1, j, 5), torch.randn(5))]
    s, A = additive_scores(*leaves), weights(*leaves[:2], score=Additive(leaves[2]))
    assert s.shape == A[:].shape == A.dense().shape == (b, 2, i, j)
    assert all(not grad.any() for grad in torch.autograd.grad(s.sum(), leaves))


def test_a_second_derivative_is_refused():
    q, k, u = inputs()
    (grad,) = torch.autograd.grad(additive_scores(q, k, u).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
