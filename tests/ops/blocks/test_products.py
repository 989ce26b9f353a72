"""A @ x and A.T @ x over blocks of rows, dropout, and the checks of the other factor."""

import pytest
import torch

from regard import Causal
from regard.ops.blocks import prepared_call
from regard.ops.blocks.prepared_call import prepare
from regard.ops.blocks.products import check_factor, product, transposed_product
from regard.ops.blocks.reduction import evaluate
from regard.ops.call import Call

B, H, G, I, J = 2, 4, 2, 17, 21
close = torch.testing.assert_close


@pytest.fixture(autouse=True, params=[2**6, 2**9], ids=["a head a block", "all heads in a block"])
def many_blocks(request, monkeypatch):
    for name, value in (("ROWS_PER_BLOCK", 4), ("KEYS_PER_TILE", 4), ("SCORES_PER_BLOCK", request.param)):
        monkeypatch.setattr(prepared_call, name, value)


def causal_call():
    return Call.of(torch.randn(B, H, I, 3).double(), torch.randn(B, G, J, 3).double(), mask=Causal())


def dense(call):
    """The weights of a causal call, written out."""
    s = call.q @ call.k.repeat_interleave(H // G, 1).mT * 3**-0.5
    return s.masked_fill(torch.arange(J) > torch.arange(I)[:, None] + J - I, -torch.inf).softmax(-1)


def even_call():
    """Every query looks evenly at all keys: dropout alone tells the weights apart."""
    return Call.of(torch.zeros(B, H, I, 3).double(), torch.zeros(B, G, J, 3).double())


def dropped(call, dropout):
    """The weights that are left: the product with the identity."""
    return evaluate(prepare(call), product(torch.eye(J).double().expand(B, 1, J, J), dropout))[0]


@pytest.mark.parametrize("heads", [1, G, H])
def test_products_and_their_gradients_are_those_of_the_dense_matrix(heads):
    call = causal_call()
    A = dense(call)
    for make, matrix, n in ((product, A, J), (transposed_product, A.mT, I)):
        x = torch.randn(B, heads, n, 5).double().requires_grad_()
        found, want = evaluate(prepare(call), make(x))[0], matrix @ x.repeat_interleave(H // heads, 1)
        close(found, want)
        close(*(torch.autograd.grad(y.sin().sum(), x) for y in (found, want)))


def test_dropout_keeps_a_share_of_the_weights_and_scales_it_up():
    A = dropped(even_call(), 0.25)
    kept = A != 0
    close(A[kept], torch.full_like(A[kept], 1 / J / 0.75))
    assert 0.70 < kept.double().mean() < 0.80
    close(dropped(even_call(), 0.0), torch.full_like(A, 1 / J))


def test_no_two_rows_lose_the_same_weights_in_whichever_block_they_lie():
    kept = (dropped(even_call(), 0.5) != 0).flatten(0, 2)
    assert kept.unique(dim=0).shape == kept.shape


def test_the_backward_drops_the_weights_that_the_forward_dropped():
    x = torch.randn(B, H, J, 5).double().requires_grad_()
    torch.manual_seed(3)
    out = evaluate(prepare(even_call()), product(x, 0.5))[0]
    torch.manual_seed(3)
    A = dropped(even_call(), 0.5)
    close(out, A @ x)
    close(*(torch.autograd.grad(y.sin().sum(), x) for y in (out, A @ x)))


def test_a_factor_is_brought_to_dims_b_heads_n_e():
    call = Call.of(torch.randn(3, 2, H, I, 3), torch.randn(3, 2, G, J, 3))
    for shape in ((J, 5), (1, J, 5), (H, J, 5), (1, G, J, 5), (1, 1, G, J, 5), (3, 2, G, J, 5)):
        x = torch.randn(shape)
        heads = shape[-3] if len(shape) > 2 else 1
        assert torch.equal(check_factor(call, x, J, "A @ x"), x.expand(3, 2, heads, J, 5).flatten(0, 1))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(J), rf"A @ x takes a floating tensor of dims b heads {J} e, got torch.float32 \({J},\)"),
        (torch.ones(J, 2, dtype=torch.long), rf"A @ x takes a floating tensor .*got torch.int64 \({J}, 2\)"),
        (torch.ones(J, 2, device="meta"), r"A @ x: x must be on cpu, got meta; write x\.to\(A\.device\)"),
        (torch.ones(B, 3, J, 2), rf"takes x with dims b=2, heads 1, 2 or 4, {J}, e; got shape \(2, 3, {J}, 2\)"),
        (torch.ones(3, 1, J, 2), r"takes x with dims b=2, .*got shape \(3, "),
        (torch.ones(J + 1, 2), rf"takes x with dims b=2, .*got shape \({J + 1}, 2\)"),
    ],
)
def test_a_factor_that_does_not_fit_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        check_factor(causal_call(), x, J, "A @ x")
