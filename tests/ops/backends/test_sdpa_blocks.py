"""PyTorch's fused kernel over blocks of rows."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import attend
from regard.ops.backends import sdpa
from regard.ops.call import Call
from tests.ops.inputs import qkv


def test_unequal_lengths_are_aligned_bottom_right_not_as_pytorch_does(calls):
    q, k, v = qkv(60, 90, d=64)
    want = attend(q, k, v, mask=R.Causal(), backend="reference")
    torch.testing.assert_close(attend(q, k, v, mask=R.Causal(), backend="sdpa"), want)
    assert calls == ["run_blocks"]


def test_large_masked_problems_go_block_by_block(calls):
    q, k, v = qkv(200)
    torch.testing.assert_close(
        attend(q, k, v, mask=R.Window(3)), attend(q, k, v, mask=R.Window(3), backend="reference")
    )
    assert calls == ["run_blocks"]


@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_sees_nothing_within_a_block_has_an_lse_of_minus_infinity(calls):
    keep = torch.ones(40, 40, dtype=torch.bool)
    keep[[3, 20]] = False
    out, lse = sdpa.plan(Call.of(*qkv(), mask=R.Dense(keep))).run()
    assert calls == ["run_blocks"]
    assert torch.equal((lse == -torch.inf)[0, 0, :, 0].nonzero().flatten(), torch.tensor([3, 20]))
    assert (out[:, :, [3, 20]] == 0).all()


def test_how_it_is_cut_changes_no_gradient(monkeypatch, request):
    leaves = [x.double().requires_grad_() for x in qkv(shared=2)]
    whole = torch.autograd.grad(attend(*leaves, mask=R.Window(9), backend="sdpa").sin().sum(), leaves)
    request.getfixturevalue("small_blocks")
    parts = torch.autograd.grad(attend(*leaves, mask=R.Window(9), backend="sdpa").sin().sum(), leaves)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


READ_AGAIN = {
    "Dense": (torch.ones(40, 40, dtype=torch.bool).tril(), lambda x: {"mask": R.Dense(x)}),
    "Documents": (torch.arange(40) // 9, lambda x: {"mask": R.Documents(x)}),
    "Near": (torch.arange(40.0), lambda x: {"mask": R.Near(x, 5)}),
    "Added": (torch.randn(40, 40), lambda x: {"bias": R.Added(x)}),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_term_changed_before_the_backward_is_refused_by_blocks(name, calls):
    (given, terms), (q, k, v) = READ_AGAIN[name], qkv()
    v.requires_grad_()
    tensor = given.clone()
    out = attend(q, k, v, **terms(tensor), backend="sdpa")
    assert calls == ["run_blocks"]
    tensor.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", READ_AGAIN)
@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_blocks_take_terms_made_in_inference_mode(name, backend):
    (given, terms), (q, k, v) = READ_AGAIN[name], qkv()
    v.requires_grad_()
    with torch.inference_mode():
        tensor = given.clone()
    ours, want = (attend(q, k, v, **terms(x), backend=backend).sin().sum() for x in (tensor, given))
    torch.testing.assert_close(torch.autograd.grad(ours, v), torch.autograd.grad(want, v))
