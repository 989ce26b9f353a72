"""Divergences between two attention matrices over the same keys, row by row, neither of them stored.

A `Side` is one of the two: the weights of a prepared call, their mean over heads, or given numbers. `evaluate` visits
blocks of rows with every key that a row of either side may see, computes both tiles and one number a row. Its backward
visits the blocks again, as that of `reduction.evaluate` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..backends import reference
from ..call import no_autocast
from ..terms.coordinates import Selector, take_entries
from ..terms.normalizers import SinkSoftmax, Softmax
from ..torch_state import check_single_gradient, in_forward_mode, refuse_jvp
from . import prepared_call
from .prepared_call import Flags, PreparedCall, flags_of, row_tiles, split_until_uniform, visible_keys
from .reduction import (
    PLACEHOLDER,
    DifferentiableOnce,
    Take,
    add_gradients,
    clone_if_inference,
    normalize_block,
    scores,
    total_gradients,
)
from .tile_weights import PlannedBlock

Kind = Literal["kl", "js", "mse", "dot"]
KINDS: tuple[Kind, ...] = ("kl", "js", "mse", "dot")


def row_divergence(kind: Kind, n_j: int, A: Tensor, log_A: Tensor, B: Tensor, log_B: Tensor) -> Tensor:
    """The divergence of each row from its weights and their logarithms, -inf where a weight is 0: `b h i j -> b h i`.

    `n_j` is the number of keys of the whole matrix, of which a tile may leave out those that neither side sees.
    """
    match kind:
        case "kl":
            counts = A != 0
            is_infinite = (counts & (log_B == -math.inf)).any(-1)
            gap = torch.where(counts, log_A, 0.0) - torch.where(counts & (log_B != -math.inf), log_B, 0.0)
            # An infinite row passes no gradient.
            return torch.where(is_infinite, math.inf, (A * gap).sum(-1))
        case "js":
            # log(A / M) = log 2 - log(1 + B / A), M the mean of both: exact for equal weights.
            both = (log_A != -math.inf) & (log_B != -math.inf)
            gap = torch.where(both, log_B, 0.0) - torch.where(both, log_A, 0.0)
            zero = gap.new_zeros(())
            above, below = (torch.where(both, torch.logaddexp(x, zero), 0.0) for x in (gap, -gap))
            return (A * (math.log(2) - above) + B * (math.log(2) - below)).sum(-1) / 2
        case "mse":
            return (A - B).square().sum(-1) / n_j
        case "dot":
            return (A * B).sum(-1)


@dataclass(frozen=True, eq=False)
class Side:
    """One of two matrices over the same keys: weights, their mean over heads, or given numbers `b|1 h|1 i j`."""

    prepared: PreparedCall | None
    given: Tensor | None = None
    mean: bool = False

    @property
    def heads(self) -> int:
        """The number of heads of this matrix."""
        return 1 if self.mean else self._heads_computed

    @property
    def _heads_computed(self) -> int:
        if self.prepared is not None:
            return self.prepared.shape[1]
        assert self.given is not None
        return self.given.shape[1]

    @property
    def group(self) -> int:
        """The number of heads that share a key head, all of them if blocks may hold any heads."""
        return self._heads_computed // self.prepared.g if self.prepared is not None and self.heads > 1 else 0

    def tensors(self) -> list[Tensor]:
        """Every tensor that a block may read."""
        if self.prepared is not None:
            return self.prepared.tensors()
        assert self.given is not None
        return [self.given]

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Side:
        """The same side over other tensors, visited in the order of `tensors()`."""
        if self.prepared is not None:
            return replace(self, prepared=self.prepared.map_tensors(fn))
        assert self.given is not None
        return replace(self, given=fn(self.given))

    def without_statistic(self) -> Side:
        """The same side, its row statistic computed anew: a known one is detached, and derivatives flow through it."""
        return self if self.prepared is None else replace(self, prepared=replace(self.prepared, statistic=None))

    def own_heads(self, heads: slice) -> slice:
        """The heads of this side that heads of the result are computed from."""
        return heads if self.heads > 1 else slice(0, self._heads_computed)

    def tile(self, part: _Part, take: Take, with_logs: bool) -> tuple[Tensor, Tensor]:
        """The weights of a part of the matrix and their logarithms, `b h|1 i j`; without logs, the weights twice."""
        heads = self.own_heads(part.heads)
        if self.prepared is None:
            assert self.given is not None
            batch, heads = (
                x if n > 1 else slice(None) for x, n in zip((part.batch, heads), self.given.shape, strict=False)
            )
            A = take(self.given, (batch, heads, part.rows, part.cols))
            return A, log_weights(A) if with_logs else A
        block = replace(self.prepared.block(part.batch, heads, part.rows, part.cols), take=take)
        s = _scores(self.prepared, PlannedBlock(block, part.masked(self)))
        A, statistic = normalize_block(self.prepared, block, s)
        return self._combine(A, s, statistic, with_logs)

    def whole(self, with_logs: bool) -> tuple[Tensor, Tensor]:
        """All weights and their logarithms, by the reference: differentiable any number of times."""
        if self.prepared is None:
            assert self.given is not None
            return self.given, log_weights(self.given) if with_logs else self.given
        s = reference.masked_scores(self.prepared)
        A, statistic = self.prepared.normalize.weigh(s, self.prepared.whole)
        return self._combine(A, s, statistic, with_logs)

    def _combine(self, A: Tensor, s: Tensor, statistic: Tensor | None, with_logs: bool) -> tuple[Tensor, Tensor]:
        assert self.prepared is not None
        if not with_logs:
            return (A.mean(1, keepdim=True),) * 2 if self.mean else (A, A)
        if statistic is not None and isinstance(self.prepared.normalize, (Softmax, SinkSoftmax)):
            log = s - torch.where(statistic == -math.inf, 0.0, statistic)  # finite for weights that underflow in A
        else:
            log = log_weights(A)
        return (A.mean(1, keepdim=True), _log_mean(log)) if self.mean else (A, log)


def log_weights(A: Tensor) -> Tensor:
    """log A, -inf where A is 0; NaN where it is negative."""
    return torch.where(A == 0, -math.inf, torch.where(A == 0, 1.0, A).log())


def _log_mean(log: Tensor) -> Tensor:
    """The logarithm of the mean over heads, from those of the heads: `b h i j -> b 1 i j`."""
    top = log.detach().amax(1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    total = (log - top).exp().mean(1, keepdim=True)
    return torch.where(total == 0, -math.inf, top + torch.where(total == 0, 1.0, total).log())


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of the result, the keys that they may see on either side, and where each side must look at its mask."""

    batch: slice
    heads: slice  # heads count those of the result
    rows: slice
    cols: Selector
    masks: tuple[tuple[Side, slice | None], ...]

    def masked(self, side: Side) -> slice | None:
        return next(masked for each, masked in self.masks if each is side)


def evaluate(kind: Kind, A: Side, B: Side) -> Tensor:
    """The divergence of each row, `b h i`, differentiable once; any number of times if a side is stored whole."""
    b, h, i, j = _shape(A, B)
    sides = (A, B)
    if any(side.prepared is not None and side.prepared.dense for side in sides):
        (a, log_a), (c, log_c) = (side.whole(kind in ("kl", "js")) for side in sides)
        return row_divergence(kind, max(1, j), a, log_a, c, log_c).expand(b, h, i)
    tensors = [x for side in sides for x in side.tensors()]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if learns or in_forward_mode():
        sides = A.without_statistic(), B.without_statistic()
    if learns:
        value: Tensor = BlockwiseDivergence.apply(kind, sides, *tensors)
        return value
    with torch.no_grad():
        return _forward(kind, *sides)


class BlockwiseDivergence(torch.autograd.Function):
    """Forward: blocks without a graph. Backward: each block again, with a graph of its own."""

    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(ctx: Any, kind: Kind, sides: tuple[Side, Side], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*map(clone_if_inference, tensors))
        ctx.kind, ctx.sides = kind, [side.map_tensors(lambda _: PLACEHOLDER) for side in sides]
        return _forward(kind, *sides)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        saved = list(ctx.saved_tensors)
        queue = iter(saved)
        sides = [side.map_tensors(lambda _: next(queue)) for side in ctx.sides]
        needed = {id(x): x for x, needs in zip(saved, ctx.needs_input_grad[2:], strict=True) if needs}
        totals: dict[int, Tensor] = {}
        with torch.no_grad(), no_autocast(grad.device):
            _, _, _, j = _shape(*sides)
            for part in _parts(*sides):
                cotangent = take_entries(grad, (part.batch, part.heads, part.rows))

                def value(take: Take, part: _Part = part) -> Tensor:
                    return _value(ctx.kind, j, sides, part, take)

                with torch.enable_grad():
                    add_gradients(value, cotangent, needed, totals, grad.dtype)
            grads = total_gradients(saved, needed, totals)
        if torch.is_grad_enabled():
            # The caller recorded a graph of the gradients (create_graph=True): differentiating it must raise.
            grads = [None if g is None else DifferentiableOnce.apply(g, grad, *saved) for g in grads]
        return None, None, *grads


def _forward(kind: Kind, A: Side, B: Side) -> Tensor:
    b, h, i, j = _shape(A, B)
    first = A.tensors()[0]
    dtype = torch.promote_types(first.dtype, B.tensors()[0].dtype)
    value = torch.zeros(b, h, i, dtype=dtype, device=first.device)
    for part in _parts(A, B):
        value[part.batch, part.heads, part.rows] = _value(kind, j, (A, B), part, take_entries)
    return value


def _value(kind: Kind, n_j: int, sides: tuple[Side, Side] | list[Side], part: _Part, take: Take) -> Tensor:
    (A, log_A), (B, log_B) = (side.tile(part, take, kind in ("kl", "js")) for side in sides)
    shape = [part.batch.stop - part.batch.start, part.heads.stop - part.heads.start, part.rows.stop - part.rows.start]
    return row_divergence(kind, n_j, A, log_A, B, log_B).expand(shape)


def _shape(A: Side, B: Side) -> tuple[int, int, int, int]:
    """b h i j of both sides, broadcast."""
    prepared = A.prepared or B.prepared
    assert prepared is not None
    b, _, i, j = prepared.shape
    return b, max(A.heads, B.heads), i, j


def _scores(prepared: PreparedCall, planned: PlannedBlock) -> Tensor:
    """The scores of a block; if some keys are not finite, of parts that see each of them in all rows or in none."""
    if prepared.nonfinite_keys is None:
        return scores(prepared, planned)
    block = planned.block
    s = prepared.q.new_zeros(block.b.numel(), block.h.numel(), block.row.numel(), block.j.numel())
    for part in split_until_uniform(prepared, PlannedBlock(block, slice(0, block.j.numel()))):
        heads, rows = (
            slice(inner.start - outer.start, inner.stop - outer.start)
            for inner, outer in ((part.block.heads, block.heads), (part.block.rows, block.rows))
        )
        s[:, heads, rows] = scores(prepared, part)
    return s


def _parts(A: Side, B: Side) -> Iterator[_Part]:
    """Parts that cover every entry that a row of either side may see, in a fixed order."""
    b, h, i, j = _shape(A, B)
    if not (b and h and i and j):
        return
    sides = (A, B)
    prepared = A.prepared or B.prepared
    assert prepared is not None
    on_cpu = prepared.q.is_cpu
    entries = prepared_call.SCORES_PER_BLOCK if on_cpu else 32 * prepared_call.SCORES_PER_BLOCK
    averaged = sum(side._heads_computed for side in sides if side.mean)
    rows = min(i, prepared_call.ROWS_PER_BLOCK if on_cpu else 8 * prepared_call.ROWS_PER_BLOCK)
    rows = min(rows, max(1, entries // (j * (averaged + h))) if averaged else max(16, entries // j))
    tiles = [_tiles_of(side, rows, i, j) for side in sides]
    for (start, some_a, full_a), (_, some_b, full_b) in zip(*tiles, strict=True):
        fit = max(1, entries // (rows * j))
        for batch, heads in _batch_and_head_slices(b, h, sides, fit, bool(averaged)):
            flags = [
                [flags_of(x, batch, side.own_heads(heads)) for x in pair]
                for side, pair in zip(sides, ((some_a, full_a), (some_b, full_b)), strict=True)
            ]
            some = np.any(flags[0][0], axis=(0, 1)) | np.any(flags[1][0], axis=(0, 1))
            found = [visible_keys(some, np.all(full, axis=(0, 1)), prepared) for _, full in flags]
            if found[0] is None or found[1] is None:  # neither side sees a key
                continue
            masks = tuple((side, keys[1]) for side, keys in zip(sides, found, strict=True) if keys is not None)
            yield _Part(batch, heads, slice(start, min(start + rows, i)), found[0][0], masks)


def _tiles_of(side: Side, rows: int, i: int, j: int) -> Iterator[tuple[int, Flags, Flags]]:
    if side.prepared is not None:
        return row_tiles(side.prepared, rows)
    everything = np.ones((1, 1, -(-j // prepared_call.KEYS_PER_TILE)), dtype=bool)
    return ((start, everything, everything) for start in range(0, i, rows))


def _batch_and_head_slices(
    b: int, h: int, sides: tuple[Side, Side], fit: int, all_heads: bool
) -> Iterator[tuple[slice, slice]]:
    """Batch rows and heads, at most `fit` matrices at a time, in whole groups that share a key head or parts of one."""
    batch, heads = max(1, fit // h), h
    if all_heads:
        batch = 1
    elif fit < h:
        groups = [side.group for side in sides if side.group]
        heads = max(n for n in range(1, fit + 1) if all(n % group == 0 or group % n == 0 for group in groups))
    for b0 in range(0, b, batch):
        for h0 in range(0, h, heads):
            yield slice(b0, min(b0 + batch, b)), slice(h0, min(h0 + heads, h))
