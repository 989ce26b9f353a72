"""Additive attention by our own Triton kernels, which avoid a tanh per pair: stored whole, or block by block."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..backend_plan import BackendPlan, Objections
from ..blocks.prepared_call import PreparedCall, prepare
from ..blocks.products import product
from ..blocks.reduction import DifferentiableOnce, evaluate
from ..call import Call
from ..terms.normalizers import Softmax
from ..terms.scores import Additive, grouped_product
from ..torch_state import check_single_gradient, in_forward_mode, in_functorch, is_traced, run_uncompiled

name = "triton"
DEVICES = ("cuda",)  # on the CPU Triton interprets its kernels: for tests alone


def plan(call: Call) -> BackendPlan | Objections:
    """How this backend runs the call, or why it cannot."""
    return objections(call) or BackendPlan(name, partial(_run, call))


def objections(call: Call) -> Objections:
    """Why this backend cannot run the call."""
    found = kernel_objections(call)
    if not isinstance(call.score, Additive):
        found.append("it is for additive scores; PyTorch's kernels are as fast for products")
    if in_functorch():
        found.append("it works block by block, in place, which torch.func cannot follow")
    if in_forward_mode():
        found.append("its kernels have no derivative in forward mode")
    return found


@run_uncompiled
def _run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the row statistic, `b h i 1`."""
    assert call.v is not None
    if _can_store_scores(call):
        assert isinstance(call.score, Additive)
        out, statistic = StoredAdditiveAttention.apply(call.q, call.k, call.v, call.score.u)
        return out, statistic
    out, statistic = evaluate(prepare_with_kernel(call), product(call.v, call.dropout))
    return out.to(call.v.dtype), statistic


def prepare_with_kernel(call: Call, statistic: Tensor | None = None, *, reads_hidden: bool = False) -> PreparedCall:
    """The prepared call, with additive scores computed by our kernel if it can."""
    kernel = isinstance(call.score, Additive) and call.backend in (None, name) and not (is_traced() or objections(call))
    return replace(prepare(call, statistic, reads_hidden=reads_hidden), kernel=kernel)


MAX_STORED_SCORES = 2**24  # more scores than this are computed block by block


def _can_store_scores(call: Call) -> bool:
    """True for a plain softmax over so few scores that they can be stored."""
    b, h, i, j = call.shape
    plain = call.mask is None and call.bias is None and type(call.normalize) is Softmax and not call.dropout
    chosen = call.is_selection
    return plain and not chosen and 0 < b * h * i * j <= MAX_STORED_SCORES


class StoredAdditiveAttention(torch.autograd.Function):
    """softmax(u . tanh(q + k)) v with the weights stored for the backward: few launches for a small matrix."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        from ...kernels.additive_scores import compute_scores
        from ...kernels.softmax import softmax

        s, saved = compute_scores(q, k, u)
        A, statistic = softmax(s, v.dtype)
        ctx.save_for_backward(A, v, *saved)
        ctx.mark_non_differentiable(statistic)
        return grouped_product(A, v), statistic

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        from ...kernels.additive_scores import SavedTensors, score_gradients
        from ...kernels.softmax import softmax_gradient

        check_single_gradient(grad)
        A, v, *saved = ctx.saved_tensors
        b, h, i, j = A.shape
        with torch.no_grad():
            ds = softmax_gradient(A, grouped_product(grad, v.mT))
            together = (b, v.shape[1], h // v.shape[1] * i)
            dv = A.reshape(*together, j).mT @ grad.reshape(*together, -1)
            dq, dk, du = score_gradients(SavedTensors(*saved), ds)
        grads = dq, dk, dv, du
        if torch.is_grad_enabled():
            # The caller recorded a graph of the gradients (create_graph=True): differentiating it must raise.
            return tuple(DifferentiableOnce.apply(x, grad, A, v, *saved[:3]) for x in grads)
        return grads


def kernel_objections(call: Call) -> list[str]:
    """Why no kernel of ours runs on these tensors."""
    found = []
    if call.q.device.type not in DEVICES:
        found.append(f"it is compiled for GPUs, and q is on {call.q.device}")
    elif not is_installed():
        found.append("Triton is not installed; pip install triton")
    if call.q.dtype == torch.float64:
        found.append("its arithmetic is float32")
    return found


@cache
def is_installed() -> bool:
    """True if Triton is installed."""
    return find_spec("triton") is not None
