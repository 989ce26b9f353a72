"""Reductions over the weights, a block of rows at a time: linear memory, forward and backward.

`evaluate(problem, reduction)` visits the blocks of a problem, weighs each, and lays the reduction's values along
the rows of the matrix or adds them up along its keys. Its backward visits the blocks again and lets autograd
differentiate each by itself, so every term has its gradient and nothing larger than a block is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..call import no_autocast
from ..terms.coordinates import Block, Selector, add_entries, take_entries
from ..terms.scores import Additive
from ..torch_state import check_single_gradient, forward_mode, no_tangents
from .additive_blocks import additive_scores
from .prepared_call import Piece, Problem, biased_and_masked, pieces, taken

BLANK = torch.empty(0)  # stands for a tensor in a problem that waits for its backward


@dataclass(frozen=True, eq=False)
class Reduction:
    """`value(problem, block, A, x)`: what a block adds to the result, along "rows" or along "keys".

    Without a value it is the statistic of the rows. `x` is the other factor of a product, if there is one; `tail` is
    the shape of one row (or key) of the result; `measure` is its name where there is a kernel for it.
    """

    value: Callable[[Problem, Block, Tensor, Tensor | None], Tensor] | None
    along: Literal["rows", "keys"]
    tail: tuple[int, ...] = ()
    x: Tensor | None = None
    measure: str | None = None

    def of(self, problem: Problem, block: Block, A: Tensor, statistic: Tensor | None) -> Tensor:
        """The value of a block, given its weights and the statistic of its rows."""
        if self.value is not None:
            return self.value(problem, block, A, self.x)
        assert statistic is not None
        return statistic.squeeze(-1)


def evaluate(problem: Problem, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
    """The reduction's result, differentiable once, and the row statistic `b h i 1`, detached."""
    tensors = [*problem.tensors(), *([] if reduction.x is None else [reduction.x])]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if learns or forward_mode():
        # A statistic of earlier is detached: with it derivatives would miss the part that flows through it.
        problem = replace(problem, statistic=None)
    if learns:
        value, statistic = ByRows.apply(problem, reduction, *tensors)
        return value, statistic
    with torch.no_grad():
        return _forward(problem, reduction)


def weigh(problem: Problem, piece: Piece) -> tuple[Tensor, Tensor | None]:
    """The weights of a block and their row statistic."""
    return normalized(problem, piece.block, scores(problem, piece))


def normalized(problem: Problem, block: Block, s: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores to weights, by the row statistic where it is known."""
    if problem.statistic is None:
        return problem.normalize.weigh(s, block)
    statistic = problem.statistic[block.batch, block.heads, block.rows]
    return problem.normalize.map(s, statistic, block), statistic


def scores(problem: Problem, piece: Piece) -> Tensor:
    """The scores of a block, hidden entries -inf."""
    block, score = piece.block, problem.score
    q = block.take(problem.q, (block.batch, block.heads, block.rows))
    k = taken(problem, block, problem.k, (block.batch, block.head_slice(problem.k.shape[1]), block.cols))
    if isinstance(score, Additive):
        u = block.take(score.u, (block.head_slice(score.u.shape[0]),) if score.u.ndim == 2 else ())
        s = _additive(problem)(q, k, u.to(q.dtype))
    else:
        s = score.tile(q, k)
    return biased_and_masked(problem, piece, s)


def _additive(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if not problem.kernel:
        return additive_scores
    from ...kernels.additive import additive_scores as additive

    return additive.additive_scores


class ByRows(torch.autograd.Function):
    """Forward: blocks without a graph. Backward: each block again, with one of its own."""

    jvp = staticmethod(no_tangents)

    @staticmethod
    def forward(ctx: Any, problem: Problem, reduction: Reduction, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*map(saveable, tensors))
        ctx.problem = problem.map_tensors(lambda _: BLANK)
        ctx.reduction = replace(reduction, x=None)
        value, statistic = _forward(problem, reduction)
        if statistic is not None:
            ctx.mark_non_differentiable(statistic)
        return value, statistic

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        saved = list(ctx.saved_tensors)
        with torch.no_grad(), no_autocast(grad.device):
            grads = ByRows._backward(ctx, grad, saved)
        if torch.is_grad_enabled():
            # Somebody means to differentiate these gradients; let them hear that it cannot be done here.
            grads = [None if g is None else Once.apply(g, grad, *saved) for g in grads]
        return None, None, *grads

    @staticmethod
    def _backward(ctx: Any, grad: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        queue = iter(saved)
        problem = ctx.problem.map_tensors(lambda _: next(queue))
        reduction = replace(ctx.reduction, x=next(queue, None))
        needed = {id(x): x for x, needs in zip(saved, ctx.needs_input_grad[2:], strict=True) if needs}
        totals: dict[int, Tensor] = {}
        for piece in pieces(problem):
            with torch.enable_grad():
                _pull_back(problem, reduction, piece, grad, needed, totals)
        for key, x in needed.items():
            totals.setdefault(key, torch.zeros_like(x))  # where no block has a row that sees anything
        # A tensor that serves twice has one total: hand it out once.
        grads = [(x, totals.pop(id(x), None)) for x in saved]
        return [None if total is None else total.to(x.dtype) for x, total in grads]


def saveable(x: Tensor) -> Tensor:
    """A tensor as autograd saves it for the backward: it refuses those of inference mode."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class Once(torch.autograd.Function):
    """The identity, for gradients that must not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "this backend is differentiable once; pass backend='reference' where second derivatives are needed"
        )


def _forward(problem: Problem, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
    b, h, i, j = problem.shape
    n = i if reduction.along == "rows" else j
    result = torch.zeros(b, h, n, *reduction.tail, dtype=problem.q.dtype, device=problem.q.device)
    statistic = nothing_seen(problem) if problem.statistic is None else problem.statistic.clone()
    for piece in pieces(problem):
        block = piece.block
        A, rows = weigh(problem, piece)
        _place(result, reduction, block, reduction.of(problem, block, A, rows))
        if statistic is not None and rows is not None:
            statistic[block.batch, block.heads, block.rows] = rows
    if reduction.value is None and statistic is not None:  # that of rows in no block is known, too
        result = statistic.squeeze(-1).clone()
    return result, statistic


def nothing_seen(problem: Problem) -> Tensor | None:
    """The statistic of rows that see no key, `b h i 1`."""
    whole = replace(problem.whole(), cols=slice(0, 0))
    statistic = problem.normalize.statistic(problem.q.new_empty(*problem.shape[:3], 0), whole)
    return None if statistic is None else statistic.expand(*problem.shape[:3], 1).clone()


def _place(result: Tensor, reduction: Reduction, block: Block, value: Tensor) -> None:
    index = _where(reduction, block)
    if reduction.along == "rows":
        result[index] = value
    else:
        add_entries(result, index, value)


def _where(reduction: Reduction, block: Block) -> tuple[Selector, ...]:
    return block.batch, block.heads, block.rows if reduction.along == "rows" else block.cols


def _pull_back(
    problem: Problem,
    reduction: Reduction,
    piece: Piece,
    grad: Tensor,
    needed: dict[int, Tensor],
    totals: dict[int, Tensor],
) -> None:
    """Differentiate one block and add its gradients to the totals, by the id of what they are gradients of."""
    leaves: list[tuple[int, tuple[Selector, ...], Tensor]] = []

    def take(x: Tensor, index: tuple[Selector, ...]) -> Tensor:
        part = take_entries(x, index)
        if id(x) in needed:
            part = part.detach().requires_grad_()
            leaves.append((id(x), index, part))
        return part

    block = replace(piece.block, take=take)
    value = reduction.of(problem, block, *weigh(problem, Piece(block, piece.masked)))
    cotangent = take_entries(grad, _where(reduction, block)).to(value.dtype)
    if not value.requires_grad:
        return
    grads = torch.autograd.grad(value, [leaf for _, _, leaf in leaves], cotangent, allow_unused=True)
    for (key, index, _), g in zip(leaves, grads, strict=True):
        if g is not None:
            # Sums over blocks are kept in the dtype of accumulation.
            x = needed[key]
            if key not in totals:
                totals[key] = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, problem.q.dtype))
            add_entries(totals[key], index, g.to(totals[key].dtype))
