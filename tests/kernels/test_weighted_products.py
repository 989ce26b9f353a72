"""Products with the weights, and gradients of measures, by kernels."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import weights
from regard.kernels import weighted_products as products
from regard.ops.weights import choose_reducer
from tests.kernels.judged import TERMS, judged


@pytest.fixture
def small_tiles(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(products, "product_config", lambda d, e, dtype: products.ProductConfig(16, 32, 4, 2))
    return device


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_the_transposed_product_is_that_of_the_dense_matrix(terms, small_tiles):
    q, k = torch.randn(2, 2, 19, 16, device=small_tiles), torch.randn(2, 1, 40, 16, device=small_tiles)
    x = torch.randn(2, 1, 19, 5, device=small_tiles)
    A, exact = judged(q, k, terms)
    got = (A.T @ x).cpu().double()
    assert not got.isnan().any()
    torch.testing.assert_close(got, exact.T @ x.cpu().double(), atol=1e-5, rtol=1e-5)


def test_wide_factors_are_taken_in_parts(small_tiles, monkeypatch):
    monkeypatch.setattr("regard.ops.fused.kernel_reductions.MAX_PRODUCT_WIDTH", 4)
    q, k = torch.randn(1, 1, 9, 8, device=small_tiles), torch.randn(1, 1, 12, 8, device=small_tiles)
    x = torch.randn(1, 1, 9, 10, device=small_tiles)
    A, exact = judged(q, k, {})
    torch.testing.assert_close((A.T @ x).cpu().double(), exact.T @ x.cpu().double(), atol=1e-5, rtol=1e-5)
    assert (A.T @ x[..., :0]).shape == (1, 1, 12, 0)


DIFFERENTIABLE = ("plain", "causal", "window", "lengths", "documents", "alibi", "cosine", "negative scale")


@pytest.mark.interpreter
@pytest.mark.parametrize("measure", ["entropy", "received"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_measures_are_those_of_the_dense_matrix(name, measure, small_tiles):
    q, k = torch.randn(2, 2, 19, 16, device=small_tiles), torch.randn(2, 1, 40, 16, device=small_tiles)
    leaves = [x.requires_grad_() for x in (q, k)]
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k)]
    A, _ = judged(q.detach(), k.detach(), TERMS[name])
    A = weights(*leaves, mask=A._call.mask, bias=A._call.bias, score=A._call.score)
    B = weights(*exact, **{n: t.map_tensors(torch.Tensor.cpu) for n, t in TERMS[name].items()}, backend="reference")
    value, want = getattr(A, measure)(), getattr(B, measure)()
    torch.testing.assert_close(value.detach().cpu().double(), want.detach(), atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(want)
    ours, theirs = torch.autograd.grad(value, leaves, grad.to(value)), torch.autograd.grad(want, exact, grad)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.cpu().double(), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("measure", ["entropy", "received"])
def test_a_measure_may_be_written_to_before_it_is_differentiated(measure, small_tiles):
    q, k = torch.randn(1, 2, 9, 8, device=small_tiles, requires_grad=True), torch.randn(1, 2, 9, 8, device=small_tiles)
    (want,) = torch.autograd.grad((getattr(weights(q, k), measure)() / 3)[..., 0].sum(), q)
    value = getattr(weights(q, k), measure)()
    value /= 3
    (got,) = torch.autograd.grad(value[..., 0].sum(), q)
    torch.testing.assert_close(got, want)


def test_a_second_derivative_raises(small_tiles):
    q, k = torch.randn(2, 1, 1, 9, 8, device=small_tiles).requires_grad_().unbind()
    (grad,) = torch.autograd.grad(weights(q, k).entropy().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_other_gradients_are_computed_without_the_kernel(small_tiles):
    q, k = torch.randn(1, 2, 9, 8, device=small_tiles, requires_grad=True), torch.randn(1, 2, 9, 8, device=small_tiles)
    for terms in (
        {"bias": R.Alibi(slopes=torch.rand(2, device=small_tiles).requires_grad_())},
        {"score": R.Dot(cap=2.0)},
    ):
        A = weights(q, k, **terms)
        assert not choose_reducer(A.call).can_measure("entropy")
    assert not choose_reducer(weights(q, k).call).can_measure("max")


@pytest.mark.parametrize("measure", ["entropy", "received"])
@pytest.mark.parametrize(
    "term",
    [
        lambda x: {"mask": R.Documents(x.floor().long())},
        lambda x: {"mask": R.Padding(x[4:5].long())},
        lambda x: {"bias": R.Added(x[None])},
    ],
    ids=["documents", "lengths", "bias"],
)
def test_a_term_changed_before_the_gradient_is_taken_raises(measure, term, small_tiles):
    q, k = torch.randn(2, 1, 2, 9, 8, device=small_tiles).requires_grad_().unbind()
    terms = term(torch.linspace(0, 2, 9, device=small_tiles))
    value = getattr(weights(q, k, **terms), measure)().sum()
    for x in (x for term in terms.values() for x in term.tensors()):
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_mask_of_inference_mode_serves_a_gradient(small_tiles):
    q, k = torch.randn(2, 1, 2, 9, 8, device=small_tiles).requires_grad_().unbind()
    with torch.inference_mode():
        ids = torch.arange(9, device=small_tiles) // 4
    A, B = (weights(q, k, mask=R.Documents(x)) for x in (ids, ids.clone()))
    assert choose_reducer(A.call).can_measure("entropy")
    for ours, want in zip(*(torch.autograd.grad(x.entropy().sum(), (q, k)) for x in (A, B)), strict=True):
        assert torch.equal(ours, want)


@pytest.mark.parametrize("name", ["plain", "documents", "alibi", "added"])
def test_a_nan_row_is_nan_for_every_key_it_sees(name, small_tiles):
    q, k = torch.randn(2, 2, 19, 16, device=small_tiles), torch.randn(2, 1, 40, 16, device=small_tiles)
    seen = judged(q, k, TERMS[name])[1].dense() != 0
    k[1, 0, 30, 5] = torch.nan
    A, _ = judged(q, k, TERMS[name])
    rows = seen[..., 30] & torch.tensor([False, True])[:, None, None]
    got = (A.T @ torch.ones(2, 1, 19, 5, device=small_tiles)).isnan().any(-1).cpu()
    assert torch.equal(got, (seen & rows[..., None]).any(-2))
