"""Divergences as methods of weights: what may be compared with what, rows, dtypes and modes."""

import pytest
import torch

from regard import Causal, weights
from regard.ops.weights import HeadMean

KINDS = ("kl", "js", "mse", "dot")
close = torch.testing.assert_close
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(*lead, h=2, i=6, j=9, d=4, dtype=torch.float32, **terms):
    lead = lead or (3,)
    return weights(torch.randn(*lead, h, i, d, dtype=dtype), torch.randn(*lead, 1, j, d, dtype=dtype), **terms)


@every_kind
def test_leading_dims_are_restored(kind):
    A, B = made(2, 3), made(2, 3, h=1)
    found = getattr(A, kind)(B)
    assert found.shape == (2, 3, 2, 6)
    flat = [weights(x.call.q, x.call.k) for x in (A, B)]
    close(found.flatten(0, 1), getattr(flat[0], kind)(flat[1]))
    for target in (torch.rand(2, 3, 1, 6, 9), torch.rand(1, 1, 2, 6, 9), torch.rand(6, 9)):
        assert getattr(A, kind)(target).shape == (2, 3, 2, 6)


@every_kind
@pytest.mark.parametrize("rows", [4, -1, slice(1, 5, 2), [5, 0, 0], torch.tensor([2]), []])
def test_rows_are_those_of_the_whole(kind, rows):
    A, B = made(mask=Causal()), made(h=1)
    ids = torch.arange(6)[rows].reshape(-1)
    want = getattr(A, kind)(B)[:, :, ids]
    close(getattr(A, kind)(B, rows=rows), want)
    close(getattr(A, kind)(B.dense()[:, :, ids], rows=rows), getattr(A, kind)(B.dense())[:, :, ids])
    A.summary()
    close(getattr(A, kind)(B, rows=rows), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_in_float32(dtype):
    A, B = made(dtype=dtype), made(dtype=torch.float32)
    found = A.kl(B)
    assert found.dtype == torch.float32
    close(found, weights(A.call.q.float(), A.call.k.float()).kl(B))


def test_bool_and_whole_number_targets_are_weights_of_0_and_1():
    A = made()
    chosen = torch.rand(6, 9) > 0.5
    close(A.dot(chosen), (A.dense() * chosen).sum(-1))
    close(A.dot(chosen.long()), A.dot(chosen))


def test_a_known_statistic_changes_nothing():
    A, B = made(mask=Causal()), made()
    want = A.js(B)
    A.summary(), B.summary()
    close(A.js(B), want)


def test_a_gradient_after_the_statistic_is_that_before_it():
    q, k = torch.randn(1, 2, 6, 4, requires_grad=True), torch.randn(1, 2, 9, 4)
    A, B = weights(q, k), made(1)
    (want,) = torch.autograd.grad(A.js(B).sum(), q)
    A.summary()
    close(torch.autograd.grad(A.js(B).sum(), q)[0], want)


def test_grad_mode_counts_at_evaluation_and_inference_tensors_serve():
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    with torch.inference_mode():
        B = made(1)
    A = weights(q, torch.randn(1, 2, 9, 4))
    with torch.no_grad():
        assert not A.kl(B).requires_grad
    A.kl(B).sum().backward()
    assert q.grad is not None


@every_kind
def test_a_target_learns_too(kind):
    A, target = made(1), torch.rand(6, 9).softmax(-1).requires_grad_()
    (grad,) = torch.autograd.grad(getattr(A, kind)(target).sum(), target)
    exact = torch.autograd.grad(getattr(weights(A.call.q, A.call.k, backend="reference"), kind)(target).sum(), target)
    close(grad, exact[0])


class TestHeadMean:
    def test_it_is_the_mean_of_the_matrix(self):
        A = made(mask=Causal())
        M = A.mean_heads()
        assert isinstance(M, HeadMean)
        assert M.shape == (3, 1, 6, 9)
        close(M.dense(), A.dense().mean(1, keepdim=True))
        assert repr(M) == "Weights(3 x 2 x 6 x 9, mask=Causal()).mean_heads()"

    def test_one_that_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match="more than limit='1KB'"):
            made().mean_heads().dense(limit="1KB")


@pytest.mark.parametrize(
    "other",
    [made(2), made(h=3), made(i=5), made(j=8), made(1, 3)],
    ids=["batch rows", "heads", "queries", "keys", "leading dims"],
)
def test_matrices_that_do_not_fit_are_refused(other):
    with pytest.raises(ValueError, match=r"A\.kl\(B\) takes two matrices .* got 3 x 2 x 6 x 9 and .*A.mean_heads\(\)"):
        made().kl(other)


@pytest.mark.parametrize("shape", [(5, 9), (3, 3, 6, 9), (2, 2, 6, 9), (9,), (1, 1, 1, 6, 9)])
def test_targets_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"A\.js\(target\) takes a target with dims b=3 or 1, h=2 or 1, i=6, j=9, got"):
        made().js(torch.rand(shape))


def test_complex_targets_and_other_devices_are_refused():
    with pytest.raises(ValueError, match=r"must hold real numbers on cpu, got torch.complex64 on cpu"):
        made().kl(torch.rand(6, 9).to(torch.complex64))
    with pytest.raises(ValueError, match=r"write target.to\(A.device\)"):
        made().kl(torch.rand(6, 9, device="meta"))


@pytest.mark.parametrize("other", [None, [[1.0]], 3])
def test_what_is_no_matrix_is_refused(other):
    with pytest.raises(TypeError, match=r"must be weights, A.mean_heads\(\) or a tensor of targets, got"):
        made().kl(other)


def test_rows_that_are_none_are_refused():
    with pytest.raises(IndexError, match="rows of the weights has 6 entries, got"):
        made().kl(made(), rows=[6])


def test_torch_func_is_refused_by_name():
    q, k = torch.randn(2, 4, 1, 2, 6, 4).unbind()
    with pytest.raises(ValueError, match=r"torch.func cannot follow; compute them from A.dense\(\)"):
        torch.func.vmap(lambda q, k: weights(q, k).kl(weights(k, q)))(q, k)


def test_a_change_in_place_raises():
    A, B = made(), made()
    B.call.k.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        A.kl(B)
