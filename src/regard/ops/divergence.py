"""Compare two lazy attention matrices row by row: check that they fit, and choose kernels or blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends.triton import prepare_with_kernel
from .blocks.block_reducer import BlockReducer
from .blocks.divergences import Kind, Side, evaluate
from .call import Call, no_autocast
from .fused import kernel_divergences
from .fused.kernel_reducer import KernelReducer
from .indexing import chosen_ids
from .torch_state import in_functorch, run_uncompiled

Rows = int | slice | list[int] | Tensor | None


@dataclass(frozen=True, eq=False)
class Operand:
    """One of two attention matrices: a call, its row statistic if it is known, and True for the mean of its heads.

    `keep` stores a row statistic that was computed on the way.
    """

    call: Call
    statistic: Tensor | None
    keep: Callable[[Tensor], None]
    mean: bool = False

    @property
    def heads(self) -> int:
        """The number of heads of the matrix."""
        return 1 if self.mean else self.call.shape[1]

    def take_rows(self, ids: Tensor) -> Operand:
        """The same matrix, of some queries alone."""
        statistic = None if self.statistic is None else self.statistic[:, :, ids]
        return Operand(self.call.select(rows=ids), statistic, lambda _: None, self.mean)

    def row_statistic(self) -> Tensor:
        """The row statistic `b h i 1`, by a fused product if it is not known."""
        found = KernelReducer(self.call, self.statistic, BlockReducer(self.call, self.statistic)).row_statistic()
        self.keep(found)
        return found

    def side(self) -> Side:
        """This matrix for blocks of rows."""
        return Side(prepare_with_kernel(self.call, self.statistic), mean=self.mean)


@run_uncompiled
def divergence_of(kind: Kind, A: Operand, B: Operand | Tensor, rows: Rows) -> Tensor:
    """The divergence of each row of A from B, or of the named rows: `b h i`, with the leading dims of A."""
    if in_functorch():
        raise ValueError(
            "divergences are computed block by block, in place, which torch.func cannot follow; compute them from "
            "A.dense() and B.dense(), or outside of vmap, grad and the like"
        )
    lead, device = A.call.lead, A.call.q.device
    if isinstance(B, Operand):
        _check_alike(kind, A, B)
    if rows is not None:
        ids = chosen_ids("rows", rows, A.call.shape[2], device)
        A, B = A.take_rows(ids), B.take_rows(ids) if isinstance(B, Operand) else B
    if isinstance(B, Tensor):
        B = _check_target(kind, A, B)
    with no_autocast(device):
        if isinstance(B, Operand) and not (A.mean or B.mean or kernel_divergences.objections(A.call, B.call)):
            statistics = A.row_statistic(), B.row_statistic()
            found = kernel_divergences.divergence_by_kernel(kind, A.call, B.call, *statistics)
        else:
            found = evaluate(kind, A.side(), B.side() if isinstance(B, Operand) else Side(None, B))
    return found if len(lead) == 1 else found.unflatten(0, lead)


def _check_alike(kind: Kind, A: Operand, B: Operand) -> None:
    a, b = ((*each.call.lead, each.heads, *each.call.shape[2:]) for each in (A, B))
    heads_fit = A.heads == B.heads or 1 in (A.heads, B.heads)
    if a[:-3] != b[:-3] or a[-2:] != b[-2:] or not heads_fit:
        raise ValueError(
            f"A.{kind}(B) takes two matrices with the same batch rows, queries, keys and heads, or one head, got "
            f"{' x '.join(map(str, a))} and {' x '.join(map(str, b))}; A.mean_heads() has one head"
        )
    if A.call.q.device != B.call.q.device:
        raise ValueError(
            f"both sides of A.{kind}(B) must be on one device, got {A.call.q.device} and {B.call.q.device}; "
            "move q and k with .to(...)"
        )


def _check_target(kind: Kind, A: Operand, target: Tensor) -> Tensor:
    """A target that a caller gave, as `b|1 h|1 i j` in the dtype of A."""
    b, _, i, j = A.call.shape
    lead, shape, device = A.call.lead, tuple(target.shape), A.call.q.device
    if target.is_complex() or target.device != device:
        raise ValueError(
            f"A.{kind}(target): target must hold real numbers on {device}, got {target.dtype} on {target.device}; "
            "write target.to(A.device)"
        )
    if target.ndim > 3 and len(lead) != 1 and target.shape[:-3] in (lead, (1,) * len(lead)):
        target = target.expand(*lead, *target.shape[-3:]).flatten(0, -4)
    target = target[(None,) * (4 - target.ndim)] if 2 <= target.ndim < 4 else target
    fits = target.ndim == 4 and target.shape[0] in (1, b) and target.shape[2:] == (i, j)
    if not fits or (target.shape[1] != A.heads and 1 not in (A.heads, target.shape[1])):
        batch = " x ".join(map(str, lead))
        raise ValueError(
            f"A.{kind}(target) takes a target with dims b={batch} or 1, h={A.heads} or 1, i={i}, j={j}, got {shape}; "
            "targets of some queries come with rows=[...]"
        )
    return target.to(torch.promote_types(A.call.dtype, target.dtype) if target.is_floating_point() else A.call.dtype)
