"""PyTorch's fused kernel on the CPU: one call where it can do the whole, block by block where it cannot.

Dot products and softmax under any mask, in linear memory. A plain or causal call is one call of the kernel; any other
mask, and any bias that is not learned, is handed over as a small tile for each block of rows, empty tiles left out.
The kernel returns the log-sum-exp with the output and takes grouped heads as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..masks import Causal
from ..normalizers import Softmax
from ..place import Block, give_back, pick
from ..problem import Piece, Problem, clean, minus_infinity_where_hidden, pieces, prepare
from ..rows import Once
from ..scores import Bilinear, Cosine, Dot

name = "sdpa"
INF = float("inf")


def objections(call: Call) -> list[str]:
    """What keeps this backend from running the call."""
    assert call.v is not None
    found = []
    if call.q.device.type != "cpu":
        found.append(f"it is wired to the kernel of the CPU, and q is on {call.q.device}")
    if not isinstance(call.score, (Dot, Cosine, Bilinear)) or getattr(call.score, "cap", None) is not None:
        found.append(f"{call.score!r} is no plain product of queries and keys")
    if call.normalize != Softmax():
        found.append(f"the kernel is softmax, not {call.normalize!r}")
    if call.bias is not None and any(x.requires_grad for x in (call.q, *call.bias.tensors())):
        found.append("the kernel gives no gradient to a bias")
    if call.dropout:
        found.append("with dropout PyTorch stores the matrix")
    if call.v.shape[1] != call.k.shape[1] or call.v.shape[-1] != call.k.shape[-1]:
        found.append("with values of other heads or another width than keys PyTorch stores the matrix")
    if not found and call.mask is not None and not clean(call):
        found.append("hidden keys that hold NaN, Inf or huge numbers would leak through the kernel")
    return found


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the log-sum-exp of each row, `b h i 1`."""
    assert call.v is not None
    problem = prepare(call)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (problem.q, problem.k, call.v.to(call.dtype)))
    out, lse = Fused.apply(problem, q, k, v)
    return out.to(call.v.dtype), lse


class Fused(torch.autograd.Function):
    """softmax(q k^T + tile) v over the parts of a problem; b h i d, b g j d, b g j d -> b h i d and b h i 1."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:3], 1), -INF)
        for block, added, causal in _parts(problem):
            rows, keys = _indices(block, k)
            part, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[rows], pick(k, keys), pick(v, keys), is_causal=causal, attn_mask=added, scale=1.0
            )
            out[rows] = part
            # The kernel calls the sum of an empty row 1.
            empty = False if added is None else (added == -INF).all(-1)
            lse[rows] = torch.where(torch.as_tensor(empty), -INF, total)[..., None]
        ctx.problem = problem.map_tensors(Tensor.detach)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        with torch.no_grad():
            for block, added, causal in _parts(ctx.problem):
                rows, keys = _indices(block, k)
                # A row that sees nothing has no weights to differentiate; 0 keeps the kernel from -inf - -inf.
                total = torch.where(lse[rows] == -INF, 0.0, lse[rows]).squeeze(-1)
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad[rows],
                    q[rows],
                    pick(k, keys),
                    pick(v, keys),
                    out[rows],
                    total,
                    0.0,
                    causal,
                    attn_mask=added,
                    scale=1.0,
                )
                for total_grad, index, part in zip(grads, (rows, keys, keys), parts, strict=True):
                    give_back(total_grad, index, part)
        if torch.is_grad_enabled():
            grads = [Once.apply(g, grad, q, k, v) for g in grads]
        return None, *grads


def _parts(problem: Problem) -> Iterator[tuple[Block, Tensor | None, bool]]:
    """Blocks, what is added to their scores, and whether the kernel's own causal mask applies."""
    _, _, i, j = problem.shape
    square = i == j and problem.offset == 0 and problem.row_ids is None
    plain, causal = problem.mask is None, problem.mask == Causal() and square
    if problem.bias is None and (plain or causal) and 0 not in problem.shape:
        yield problem.whole(), None, causal
        return
    for piece in pieces(problem):
        yield piece.block, _added(problem, piece), False


def _added(problem: Problem, piece: Piece) -> Tensor | None:
    """The bias of a block, -inf where the mask hides: b h|1 i j."""
    block = piece.block
    added = None if problem.bias is None else problem.bias.over(block)
    if problem.mask is not None and piece.masked is not None:
        hidden = minus_infinity_where_hidden(problem.mask, block, problem.q.dtype)
        added = hidden if added is None else added + hidden
    if added is None:
        return None
    added = added[(None,) * (4 - added.ndim)]
    return added.expand(block.b.numel(), -1, block.row.numel(), block.j.numel())


def _indices(block: Block, k: Tensor) -> tuple[Any, Any]:
    rows = block.batch, block.heads, block.rows
    return rows, (block.batch, block.shared(k.shape[1]), block.cols)
