"""PyTorch's functions of lazy weights give what they give of the dense matrix, and store none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard import Causal, Weights, weights

B, H, I, J, E = 2, 4, 6, 9, 5
close = torch.testing.assert_close


def make(*lead: int, grad: bool = False) -> Weights:
    torch.manual_seed(3)
    q, k = torch.randn(*(lead or (B,)), H, I, 8).double(), torch.randn(*(lead or (B,)), 2, J, 8).double()
    return weights(q.requires_grad_(grad), k.requires_grad_(grad), mask=Causal())


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_matmul_takes_the_weights_on_either_side():
    A, v, u = make(), normal(B, H, J, E), normal(B, H, I, E)
    D = A.dense()
    close(torch.matmul(A, v), D @ v)
    close(torch.matmul(u.mT, A), u.mT @ D)
    close(u.mT @ A, u.mT @ D)
    close(torch.matmul(A.T, u), D.mT @ u)
    close(v.mT @ A.T, v.mT @ D.mT)
    close(v.mT.matmul(A.T), v.mT @ D.mT)


SIZES = {"b": B, "h": H, "i": I, "j": J, "d": E, "e": 3, "x": 2}
PRODUCTS = [
    ("bhij,bhjd->bhid", "bhjd"),
    ("bhij,bjhd->bihd", "bjhd"),
    ("b h i j, b h j d -> b h i d", "bhjd"),
    ("bhij,bhid->bhjd", "bhid"),
    ("bhij,bjd->bhid", "bjd"),
    ("bhij,jd->bid", "jd"),
    ("bhij,bhjd", "bhjd"),
    ("...ij,...jd->...id", "bhjd"),
    ("...ij,...jd", "bhjd"),
    ("b...ij,bjd->b...id", "bjd"),
    ("bhij,bhj->bhi", "bhj"),
    ("bhij,bhi->bhj", "bhi"),
    ("bhij,bhi->bhi", "bhi"),
    ("bhij,bhj->bhj", "bhj"),
    ("bhij,bhi->", "bhi"),
    ("bhij,bhid->bhd", "bhid"),
    ("bhij,h->bi", "h"),
    ("bhij,bhjde->bheid", "bhjde"),
    ("bhij,xbhj->xbhi", "xbhj"),
]


@pytest.mark.parametrize(("equation", "letters"), PRODUCTS, ids=lambda x: x)
def test_einsum_is_that_of_the_matrix(equation, letters):
    A, x = make(), normal(*(SIZES[letter] for letter in letters))
    close(torch.einsum(equation, A, x), torch.einsum(equation, A.dense(), x))


@pytest.mark.parametrize("equation", ["bhij->bhj", "bhij->bhi", "bhij->bh", "bhij->ib", "...ij->...i"])
def test_einsum_sums_the_weights_alone(equation):
    A = make()
    close(torch.einsum(equation, A), torch.einsum(equation, A.dense()))


def test_einsum_takes_the_weights_second_and_transposed_and_with_more_batch_dims():
    A, v = make(), normal(B, H, J, E)
    close(torch.einsum("bhjd,bhij->bhid", v, A), A.dense() @ v)
    close(torch.einsum("bhji,bhjd->bhid", A.T, v), A.dense() @ v)
    A, v = make(3, 2), normal(3, 2, H, J, E)
    close(torch.einsum("abhij,abhjd->abhid", A, v), A.dense() @ v)
    close(torch.einsum("abhij,hjd->abhid", A, v[0, 0]), A.dense() @ v[0, 0])


def test_einsum_has_the_gradients_of_the_matrix():
    A, v = make(grad=True), normal(B, J, H, E).requires_grad_()
    q, k = A.call.q, A.call.k
    found = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", A, v).square().sum(), (q, k, v))
    D = torch.softmax(
        (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(torch.ones(I, J).triu(J - I + 1).bool(), -torch.inf), -1
    )
    want = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", D, v).square().sum(), (q, k, v))
    for one, other in zip(found, want, strict=True):
        close(one, other)


def test_topk_is_that_of_the_matrix():
    A = make()
    close(torch.topk(A, 3).values, A.dense().topk(3).values)
    close(torch.topk(A, 2, dim=3).values, A.dense().topk(2).values)
    for arguments in ({"dim": 1}, {"largest": False}):
        with pytest.raises(ValueError, match=r"write A\.dense\(\)\.topk"):
            torch.topk(A, 2, **arguments)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda A, x: torch.einsum("bhij->bhji", A), "needs every entry of the matrix"),
        (lambda A, x: torch.einsum("bhij,bhij->bhi", A, x), "needs every entry of the matrix"),
        (lambda A, x: torch.einsum("bhij,bh->bhij", A, x[..., 0, 0]), "needs every entry of the matrix"),
        (lambda A, x: torch.einsum("bhii->bhi", A), "no product"),
        (lambda A, x: torch.einsum("bhij,bhkj->bhik", A, A), "one lazy matrix and at most one tensor, got 2 and 0"),
        (lambda A, x: torch.einsum("bhij,bhij,b->bhi", A, x, x), "at most one tensor, got 1 and 2"),
        (lambda A, x: torch.einsum("bij,bhij->bhi", A, x), "names 3 dims of operand 0, which has 4"),
        (lambda A, x: torch.einsum("bhij->bh", A, x), "is for 1 operands, got 2"),
        (lambda A, x: torch.sum(A), r"write torch\.sum\(A\.dense\(\), \.\.\.\)"),
        (lambda A, x: torch.softmax(A, -1), "would store the matrix"),
        (lambda A, x: torch.matmul(A, A.T), r"write A @ B\.dense\(\)"),
    ],
)
def test_what_would_store_the_matrix_is_refused(call, told):
    with pytest.raises((TypeError, ValueError), match=told):
        call(make(), normal(B, H, I, J))
