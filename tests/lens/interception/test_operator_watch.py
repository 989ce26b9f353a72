"""OperatorWatch: the operators of attentions are reported in the thread that watches, and no others."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from regard.lens.interception.operator_watch import SDPA_OPERATOR, can_watch, set_watcher

pytestmark = pytest.mark.skipif(not can_watch(), reason="this version of PyTorch lets no operators be watched")


@pytest.fixture
def seen():
    ops = []
    set_watcher(lambda *op: ops.append(op))
    yield ops
    set_watcher(None)


def names(ops):
    return [str(op[0]).split(".")[1] for op in ops]


def test_products_softmaxes_and_kernels_are_reported_with_their_tensors(seen):
    q = torch.randn(1, 2, 7, 4)
    s = q @ q.mT
    A = F.softmax(s / 2, -1)
    out = torch.einsum("bhij,bhjd->bhid", A, q)
    F.scaled_dot_product_attention(q, q, q, scale=0.3)
    assert names(seen) == ["matmul", "softmax", "einsum", "scaled_dot_product_attention"]
    assert seen[0][1][0] is q
    assert seen[0][3] is s
    assert seen[1][3] is A
    assert seen[2][3] is out
    assert seen[3][0] is SDPA_OPERATOR
    assert seen[3][2] == {"scale": 0.3}


def test_other_operators_are_not_reported(seen):
    x = torch.randn(3, 7, 4)
    F.layer_norm(F.gelu(torch.nn.Linear(4, 4)(x).transpose(1, 2).reshape(3, 7, 4) + x), (4,))
    assert seen == []


def test_results_and_gradients_are_those_of_the_operators(seen):
    x = torch.randn(2, 7, 7, requires_grad=True)
    y = (x @ x.mT).softmax(-1)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    set_watcher(None)
    z = (x @ x.mT).softmax(-1)
    (expected,) = torch.autograd.grad(z.square().sum(), x)
    assert torch.equal(y, z)
    assert torch.equal(found, expected)


def test_what_a_watcher_calls_is_not_reported():
    ops = []

    def watcher(*op):
        ops.append(op)
        torch.eye(3).softmax(-1)

    set_watcher(watcher)
    try:
        torch.eye(3).softmax(-1)
        torch.eye(3) @ torch.eye(3)
    finally:
        set_watcher(None)
    assert names(ops) == ["softmax", "matmul"]


def test_errors_pass_through_and_watching_goes_on(seen):
    with pytest.raises(RuntimeError):
        torch.randn(2, 3) @ torch.randn(2, 3)
    torch.eye(3).exp()
    assert names(seen) == ["exp"]


def test_an_error_of_the_watcher_reaches_the_caller():
    def watcher(*op):
        raise MemoryError("a budget")

    set_watcher(watcher)
    try:
        with pytest.raises(MemoryError, match="a budget"):
            torch.eye(3).exp()
    finally:
        set_watcher(None)


def test_other_threads_are_not_watched(seen):
    thread = threading.Thread(target=lambda: torch.eye(3).exp())
    thread.start()
    thread.join()
    assert seen == []


def test_the_watcher_before_is_returned(seen):
    def other(*op):
        pass

    before = set_watcher(other)
    torch.eye(3).exp()
    assert seen == []
    assert set_watcher(before) is other
    torch.eye(3).exp()
    assert names(seen) == ["exp"]
