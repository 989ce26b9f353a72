"""Divergences of two matrices by kernels, and their gradients, beside the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

import regard as R
from regard import weights
from regard.kernels import row_divergences as kernel
from regard.ops.fused import kernel_divergences as fused
from tests.kernels.judged import FEW, TERMS, moved

pytestmark = pytest.mark.interpreter

KINDS = ("kl", "js", "mse", "dot")


@pytest.fixture
def small_tiles(device, monkeypatch):
    if device == "cpu":
        config = kernel.DivergenceConfig(16, 32, 4, 2)
        monkeypatch.setattr(kernel, "divergence_config", lambda d, dtype, gradient: config)
    return device


def pair(device, terms, other, *, grad=False, heads=2, dtype=torch.float32):
    """Two matrices of other widths and heads, their definitions in float64, and the inputs of both."""
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 2, 19, 16), (2, 1, 40, 16), (2, heads, 19, 12), (2, heads, 40, 12)
    # Positions along a band of steady scores, so that windows and documents leave something to compare.
    exact = [torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes]
    ours = [x.to(dtype).to(device).requires_grad_(grad) for x in exact]
    exact = [x.requires_grad_(grad) for x in exact]
    shared = terms if other is terms else None
    A, B = (moved(each, device) for each in (terms, other))
    if shared is not None:
        B = A  # one mask, by identity
    a, b = (moved(each, "cpu", torch.float64) for each in (terms, other))
    return (
        (weights(*ours[:2], **A), weights(*ours[2:], **B)),
        [weights(*exact[n : n + 2], **each, backend="reference") for n, each in ((0, a), (2, b))],
        ours,
        exact,
    )


def wide(name):
    """Terms for keys of width 12 too: those with a tensor for queries of width 16 have another side."""
    return TERMS[name] if name not in ("bilinear", "location") else {}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "kl") for name in TERMS),
        *((name, kind) for name in FEW for kind in KINDS[1:]),
    ],
)
def test_terms_of_one_pattern_have_the_divergence_of_their_matrices(kind, name, small_tiles):
    terms = wide(name)
    (A, B), (a, b), *_ = pair(small_tiles, terms, terms)
    assert fused.objections(A.call, B.call) == []
    got, want = getattr(A, kind)(B).cpu().double(), getattr(a, kind)(b)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


BANDS = [
    ("causal", "plain"),
    ("plain", "window"),
    ("window", "both sides"),
    ("lengths", "causal lengths"),
    ("diagonal", "lengths"),
    ("alibi", "sink"),
    ("bilinear", "negative scale"),
    ("cap", "t5"),
]


@pytest.mark.parametrize(("one", "other"), BANDS)
@pytest.mark.parametrize("kind", ["kl", "mse"])
def test_bands_and_lengths_may_differ_between_the_sides(kind, one, other, small_tiles):
    (A, B), (a, b), *_ = pair(small_tiles, TERMS[one], TERMS[other])
    assert fused.objections(A.call, B.call) == []
    torch.testing.assert_close(getattr(A, kind)(B).cpu().double(), getattr(a, kind)(b), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(getattr(B, kind)(A).cpu().double(), getattr(b, kind)(a), atol=1e-5, rtol=1e-5)


GRADIENTS = [
    *((name, name) for name in ("plain", "causal lengths", "documents", "added", "sink")),
    *(("causal", "plain"), ("window", "both sides"), ("lengths", "causal lengths"), ("cosine", "alibi")),
]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [("kl", *pair) for pair in GRADIENTS] + [(kind, *pair) for kind in KINDS[1:] for pair in GRADIENTS[1::4]],
)
def test_gradients_of_both_sides_are_those_of_the_definition(kind, one, other, small_tiles):
    terms = TERMS[one]
    (A, B), (a, b), ours, exact = pair(small_tiles, terms, terms if one == other else TERMS[other], grad=True)
    assert fused.objections(A.call, B.call) == []
    value, want = getattr(A, kind)(B), getattr(a, kind)(b)
    seen = want.isfinite()
    grad = torch.where(seen, torch.randn(want.shape, generator=torch.Generator().manual_seed(4)).double(), 1.0)
    got = torch.autograd.grad(value, ours, grad.to(value))
    for x, y in zip(got, torch.autograd.grad(want, exact, grad), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("terms", [{}, {"bias": R.Alibi(1)}, {"bias": R.Relative.t5(torch.randn(1, 32))}], ids=repr)
def test_one_head_is_compared_with_each_of_the_others(terms, small_tiles):
    (A, B), (a, b), ours, exact = pair(small_tiles, TERMS["causal"], {"mask": R.Causal(), **terms}, grad=True, heads=1)
    assert fused.objections(A.call, B.call) == []
    for first, second, x, y in ((A, B, a, b), (B, A, b, a)):
        value, want = first.js(second), x.js(y)
        torch.testing.assert_close(value.detach().cpu().double(), want.detach(), atol=1e-5, rtol=1e-5)
        got, true = torch.autograd.grad(value.sum(), ours), torch.autograd.grad(want.sum(), exact)
        for grad, exact_grad in zip(got, true, strict=True):
            torch.testing.assert_close(grad.cpu().double(), exact_grad, atol=2e-5, rtol=2e-5)


def test_half_precision_is_near_the_definition(small_tiles):
    (A, B), (a, b), ours, exact = pair(small_tiles, {}, {}, grad=True, dtype=torch.float16)
    value, want = A.kl(B), a.kl(b)
    torch.testing.assert_close(value.detach().cpu().double(), want.detach(), atol=1e-3, rtol=1e-3)
    got, true = torch.autograd.grad(value.sum(), ours), torch.autograd.grad(want.sum(), exact)
    for x, y in zip(got, true, strict=True):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x.cpu().double(), y, atol=0.03 * float(y.abs().max()), rtol=0)


def test_rows_that_see_no_key_and_infinite_rows_pass_no_gradient(small_tiles):
    (A, B), _, ours, _ = pair(small_tiles, {"mask": R.Padding((0, 20))}, {"mask": R.Padding((5, 9))}, grad=True)
    value = A.kl(B)
    assert (value[0] == 0).all()
    assert (value[1] == math.inf).all()
    assert (B.kl(A)[0] == math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(value.sum(), ours))
    torch.testing.assert_close(A.js(B)[0], torch.full_like(value[0], math.log(2) / 2))


def test_the_gradient_of_one_side_alone_and_a_second_derivative(small_tiles):
    (A, B), _, ours, _ = pair(small_tiles, {}, {}, grad=True)
    whole = torch.autograd.grad(A.js(B).sum(), ours)
    frozen = weights(ours[0].detach(), ours[1].detach())
    for got, want in zip(torch.autograd.grad(frozen.js(B).sum(), ours[2:]), whole[2:], strict=True):
        torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(A.js(B).sum(), ours[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_the_value_may_be_written_to_and_the_statistic_is_kept(small_tiles):
    (A, B), _, ours, _ = pair(small_tiles, {}, {}, grad=True)
    want = torch.autograd.grad((A.kl(B) / 3).sum(), ours)
    assert None not in (A.known_statistic, B.known_statistic)
    value = A.kl(B)
    value /= 3
    for x, y in zip(torch.autograd.grad(value.sum(), ours), want, strict=True):
        torch.testing.assert_close(x, y)


def test_hidden_garbage_changes_nothing(small_tiles):
    results = []
    for garbage in (math.nan, 1.0):
        generator = torch.Generator().manual_seed(3)
        tensors = [torch.randn(1, 2, n, 16, generator=generator) for n in (19, 40, 19, 40)]
        tensors[1][:, :, 30:], tensors[3][:, :, 35:] = garbage, garbage
        q, k, q2, k2 = leaves = [x.to(small_tiles).requires_grad_() for x in tensors]
        A, B = weights(q, k, mask=R.Padding((30,))), weights(q2, k2, mask=R.Padding((35,)))
        value = A.js(B)
        results.append((value, *(x[:, :, :30] for x in torch.autograd.grad(value.sum(), leaves))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
