"""Reductions over the weights, a block of rows at a time: linear memory, forward and backward.

`evaluate(prepared, reduction)` visits the blocks of a prepared call, computes its weights, and writes the
reduction's values along the rows of the matrix or adds them up along its keys. Its backward visits the blocks again and
lets autograd differentiate each by itself: every term has its gradient, and nothing larger than a block is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..call import Call, no_autocast
from ..terms.coordinates import Block, Selector, add_entries, take_entries
from ..terms.scores import Additive
from ..torch_state import check_single_gradient, in_forward_mode, refuse_jvp
from .additive_blocks import additive_scores
from .prepared_call import PreparedCall, planned_blocks, take_visible
from .tile_weights import PlannedBlock, normalize_tile, tile_scores

Take = Callable[[Tensor, tuple[Selector, ...]], Tensor]  # reads a slice of a tensor
PLACEHOLDER = torch.empty(0)  # stands for a saved tensor in a prepared call that waits for its backward


@dataclass(frozen=True, eq=False)
class Reduction:
    """`value(prepared, block, A, x)`: the contribution of a block to the result, along "rows" or along "keys".

    Without a value the result is the row statistic. `x` is the other factor of a product; `tail` is the shape of one
    row (or key) of the result; `measure` is its name if there is a kernel for it. With `reads_scores` the function gets
    the scores of the block, hidden entries -inf, instead of its weights; `empty` is the result of rows in no block.
    """

    value: Callable[[PreparedCall, Block, Tensor, Tensor | None], Tensor] | None
    along: Literal["rows", "keys"]
    tail: tuple[int, ...] = ()
    x: Tensor | None = None
    measure: str | None = None
    reads_scores: bool = False
    empty: float = 0.0

    def of(self, prepared: PreparedCall, block: Block, A: Tensor, statistic: Tensor | None) -> Tensor:
        """The value of a block, given its weights and the statistic of its rows."""
        if self.value is not None:
            return self.value(prepared, block, A, self.x)
        assert statistic is not None
        return statistic.squeeze(-1)


def evaluate(prepared: PreparedCall, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
    """The reduction's result, differentiable once, and the row statistic `b h i 1`, detached."""
    tensors = [*prepared.tensors(), *([] if reduction.x is None else [reduction.x])]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if learns or in_forward_mode():
        # A known statistic is detached: derivatives would miss the part that flows through it.
        prepared = replace(prepared, statistic=None)
    if learns:
        value, statistic = BlockwiseReduction.apply(prepared, reduction, *tensors)
        return value, statistic
    with torch.no_grad():
        return _forward(prepared, reduction)


def weigh(prepared: PreparedCall, planned: PlannedBlock) -> tuple[Tensor, Tensor | None]:
    """The weights of a block and their row statistic."""
    return normalize_block(prepared, planned.block, scores(prepared, planned))


def normalize_block(prepared: PreparedCall, block: Block, s: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores to weights, by the row statistic if it is known."""
    statistic = prepared.statistic
    known = None if statistic is None else statistic[block.batch, block.heads, block.rows]
    return normalize_tile(prepared, block, s, known)


def scores(prepared: PreparedCall, planned: PlannedBlock) -> Tensor:
    """The scores of a block, hidden entries -inf."""
    block, score = planned.block, prepared.score
    q = block.take(prepared.q, (block.batch, block.heads, block.rows))
    k = take_visible(prepared, block, prepared.k, (block.batch, block.head_slice(prepared.k.shape[1]), block.cols))
    finite = prepared.nonfinite_keys is None
    if isinstance(score, Additive):
        u = block.take(score.u, (block.head_slice(score.u.shape[0]),) if score.u.ndim == 2 else ())
        return tile_scores(
            replace(prepared, score=Additive(u)), planned, q, k, finite=finite, additive=_additive(prepared)
        )
    return tile_scores(prepared, planned, q, k, finite=finite)


def _additive(prepared: PreparedCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if not prepared.kernel:
        return additive_scores
    from ...kernels import additive_scores as kernel

    return kernel.additive_scores


class BlockwiseReduction(torch.autograd.Function):
    """Forward: blocks without a graph. Backward: each block again, with a graph of its own."""

    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(
        ctx: Any, prepared: PreparedCall, reduction: Reduction, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*map(clone_if_inference, tensors))
        ctx.prepared = prepared.map_tensors(lambda _: PLACEHOLDER)
        ctx.reduction = replace(reduction, x=None)
        value, statistic = _forward(prepared, reduction)
        if statistic is not None:
            ctx.mark_non_differentiable(statistic)
        return value, statistic

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        saved = list(ctx.saved_tensors)
        with torch.no_grad(), no_autocast(grad.device):
            grads = BlockwiseReduction._backward(ctx, grad, saved)
        if torch.is_grad_enabled():
            # The caller recorded a graph of the gradients (create_graph=True): differentiating it must raise.
            grads = [None if g is None else DifferentiableOnce.apply(g, grad, *saved) for g in grads]
        return None, None, *grads

    @staticmethod
    def _backward(ctx: Any, grad: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        queue = iter(saved)
        prepared = ctx.prepared.map_tensors(lambda _: next(queue))
        reduction = replace(ctx.reduction, x=next(queue, None))
        needed = {id(x): x for x, needs in zip(saved, ctx.needs_input_grad[2:], strict=True) if needs}
        totals: dict[int, Tensor] = {}
        for planned in planned_blocks(prepared):
            with torch.enable_grad():
                _add_block_gradients(prepared, reduction, planned, grad, needed, totals)
        return total_gradients(saved, needed, totals)


def clone_if_inference(x: Tensor) -> Tensor:
    """A tensor that autograd can save for the backward: a clone if it was made in inference mode."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class DifferentiableOnce(torch.autograd.Function):
    """The identity; its backward raises, for gradients that cannot be differentiated again."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep nothing: the backward raises."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("this backend is differentiable once; pass backend='reference' for second derivatives")


def _operand(prepared: PreparedCall, reduction: Reduction, planned: PlannedBlock) -> tuple[Tensor, Tensor | None]:
    """The entries of a block that a reduction reads, and their row statistic if it is computed for them."""
    return (scores(prepared, planned), None) if reduction.reads_scores else weigh(prepared, planned)


def _forward(prepared: PreparedCall, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
    b, h, i, j = prepared.shape
    n = i if reduction.along == "rows" else j
    result = prepared.q.new_full((b, h, n, *reduction.tail), reduction.empty)
    statistic = None if prepared.statistic is None else prepared.statistic.clone()
    if statistic is None and not reduction.reads_scores:
        statistic = empty_row_statistic(prepared)
    for planned in planned_blocks(prepared):
        block = planned.block
        A, rows = _operand(prepared, reduction, planned)
        _place(result, reduction, block, reduction.of(prepared, block, A, rows))
        if statistic is not None and rows is not None:
            statistic[block.batch, block.heads, block.rows] = rows
    if reduction.value is None and statistic is not None:  # includes rows that are in no block
        result = statistic.squeeze(-1).clone()
    return result, statistic


def empty_row_statistic(prepared: PreparedCall) -> Tensor | None:
    """The statistic of rows that see no key, `b h i 1`."""
    whole = replace(prepared.whole, cols=slice(0, 0))
    statistic = prepared.normalize.statistic(prepared.q.new_empty(*prepared.shape[:3], 0), whole)
    return None if statistic is None else statistic.expand(*prepared.shape[:3], 1).clone()


def has_row_statistic(call: Call) -> bool:
    """True if the normalizer of a call needs a row statistic."""
    empty = replace(call.whole(), rows=slice(0, 0), cols=slice(0, 0))
    return call.normalize.statistic(call.q.new_empty(*call.shape[:2], 0, 0, dtype=call.dtype), empty) is not None


def _place(result: Tensor, reduction: Reduction, block: Block, value: Tensor) -> None:
    index = _where(reduction, block)
    if reduction.along == "rows":
        result[index] = value
    else:
        add_entries(result, index, value)


def _where(reduction: Reduction, block: Block) -> tuple[Selector, ...]:
    return block.batch, block.heads, block.rows if reduction.along == "rows" else block.cols


def _add_block_gradients(
    prepared: PreparedCall,
    reduction: Reduction,
    planned: PlannedBlock,
    grad: Tensor,
    needed: dict[int, Tensor],
    totals: dict[int, Tensor],
) -> None:
    """Differentiate one block and add its gradients to `totals`, keyed by the id of the tensor."""

    def value(take: Take) -> Tensor:
        block = replace(planned.block, take=take)
        return reduction.of(prepared, block, *_operand(prepared, reduction, PlannedBlock(block, planned.masked)))

    add_gradients(value, take_entries(grad, _where(reduction, planned.block)), needed, totals, prepared.q.dtype)


def add_gradients(
    value: Callable[[Take], Tensor],
    grad: Tensor,
    needed: dict[int, Tensor],
    totals: dict[int, Tensor],
    dtype: torch.dtype,
) -> None:
    """Add the gradients of `value(take)` to `totals`; `take` makes each slice of a needed tensor an autograd leaf."""
    leaves: list[tuple[int, tuple[Selector, ...], Tensor]] = []

    def take(x: Tensor, index: tuple[Selector, ...]) -> Tensor:
        part = take_entries(x, index)
        if id(x) in needed:
            part = part.detach().requires_grad_()
            leaves.append((id(x), index, part))
        return part

    found = value(take)
    if not found.requires_grad:
        return
    parts = [leaf for _, _, leaf in leaves]
    grads = torch.autograd.grad(found, parts, grad.to(found.dtype), allow_unused=True)
    for (key, index, _), g in zip(leaves, grads, strict=True):
        if g is not None:
            # Sums over blocks are kept in the dtype of accumulation.
            x = needed[key]
            if key not in totals:
                totals[key] = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, dtype))
            add_entries(totals[key], index, g.to(totals[key].dtype))


def total_gradients(saved: list[Tensor], needed: dict[int, Tensor], totals: dict[int, Tensor]) -> list[Tensor | None]:
    """The gradient of each saved tensor; of one that occurs twice, once."""
    for key, x in needed.items():
        totals.setdefault(key, torch.zeros_like(x))  # zero gradient if no block saw this tensor
    grads = [(x, totals.pop(id(x), None)) for x in saved]
    return [None if total is None else total.to(x.dtype) for x, total in grads]
