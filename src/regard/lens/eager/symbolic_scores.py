"""Scores as what they are made of: queries, keys, and what was done to their products; and the softmax of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import add, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..recording.store import version_of
from .head_layout import HeadLayout, as_matrix, common_batch_dims, permute_batch_dims, with_batch_dims
from .matmul import Average, MatrixProduct

MAX_HIDDEN_SCORE = -1e4  # a score filled with this or less gets no weight


@dataclass(frozen=True, eq=False)
class Scores:
    """What a tensor is: scale * q @ k.mT + added, but for what is hidden."""

    q: Tensor  # *lead i d
    k: Tensor  # *lead j d
    lead: torch.Size
    scale: float = 1.0
    added: tuple[Tensor, ...] = ()  # each broadcasts to *lead i j
    hidden: tuple[Tensor, ...] = ()  # each broadcasts too, True = hidden
    finite: bool = True  # hidden by numbers, over which a row that sees nothing else spreads evenly?
    given: tuple[tuple[Tensor, int | None], ...] = ()  # what it was made of, and how often that had been written to
    zeroed: Tensor | None = None  # where they were multiplied by 0, until a number that is added hides them there

    @classmethod
    def of(cls, found: MatrixProduct) -> Scores:
        lead = common_batch_dims(found.left.shape[:-2], found.right.shape[:-2])
        added = () if found.added is None else (found.added,)
        given = tuple((x, version_of(x)) for x in (found.left, found.right, *added))
        return cls(found.left, found.right, lead, found.scale, added, given=given)

    @property
    def inputs_are_unmodified(self) -> bool:
        """Has nobody written to what they were made of since?"""
        return all(version_of(x) == version for x, version in self.given)

    @property
    def mT(self) -> Scores:
        """The same with queries and keys in each other's place."""
        return replace(self._mapped(lambda x: x.mT), q=self.k, k=self.q)

    def times(self, factor: float | Tensor, lead: torch.Size) -> Scores:
        """Multiplied, by a number or by one for each row, in a tensor whose batch dims are `lead`."""
        if isinstance(factor, Tensor):
            factor = with_batch_dims(as_matrix(factor), lead, self.lead)
            return replace(self, q=self.q * factor, added=tuple(x * factor for x in self.added))
        return replace(self, scale=self.scale * factor, added=tuple(x * factor for x in self.added))

    def plus(self, x: Tensor, lead: torch.Size) -> Scores:
        """With numbers added; one for a whole row changes no weights."""
        given = (*self.given, (x, version_of(x)))
        x = with_batch_dims(as_matrix(x if x.is_floating_point() else x.to(self.q.dtype)), lead, self.lead)
        if self.zeroed is not None and bool((~self.zeroed | (x <= MAX_HIDDEN_SCORE)).all()):
            x = torch.where(self.zeroed, 0, x)
            return replace(self, added=(*self.added, x), hidden=(*self.hidden, self.zeroed), zeroed=None, given=given)
        if x.shape[-1] == 1 < self.k.shape[-2]:
            return self
        return replace(self, added=(*self.added, x), given=given)

    def gated(self, factor: Tensor, lead: torch.Size) -> Scores | None:
        """Multiplied by a 1 or a 0 for each of them."""
        factor = with_batch_dims(as_matrix(factor), lead, self.lead)
        closed = factor == 0
        return replace(self, zeroed=closed) if self.zeroed is None and bool((closed | (factor == 1)).all()) else None

    def without(self, hidden: Tensor, lead: torch.Size, *, by: float) -> Scores:
        """With some of them hidden."""
        hides, given = (
            (*self.hidden, with_batch_dims(as_matrix(hidden), lead, self.lead)),
            (*self.given, (hidden, version_of(hidden))),
        )
        return replace(self, hidden=hides, finite=self.finite and by > -torch.inf, given=given)

    def with_batch_dims(self, lead: torch.Size) -> Scores:
        """With other batch dims for the same matrices."""
        if lead == self.lead:
            return self
        moved = self._mapped(lambda x: with_batch_dims(x, self.lead, lead))
        return replace(
            moved, q=with_batch_dims(self.q, self.lead, lead), k=with_batch_dims(self.k, self.lead, lead), lead=lead
        )

    def in_layout(self, layout: HeadLayout) -> Scores:
        """With batch dims b h, to be told."""
        return replace(self._mapped(layout.of_matrices), q=layout.of_matrices(self.q), k=layout.of_matrices(self.k))

    def mask_and_bias(self) -> dict[str, Tensor]:
        """What hides, with what is added there, as `mask`, and what is added besides as `bias`, both numbers."""
        hiding = [x for x in self.added if bool((x <= MAX_HIDDEN_SCORE).any())]
        beside = [x for x in self.added if not any(x is other for other in hiding)]
        mask, bias = self._hiding(hiding), reduce(add, beside) if beside else None
        return {name: x for name, x in (("mask", mask), ("bias", bias)) if x is not None}

    def permute_batch_dims(self, shape: torch.Size, order: Sequence[int]) -> Scores:
        """With its batch dims in another order, where it has a `shape` of *lead i j."""
        lead = shape[:-2]

        def moved(x: Tensor) -> Tensor:
            return permute_batch_dims(x.expand(*lead, *x.shape[-2:]), order)

        scores = self.with_batch_dims(lead)._mapped(moved)
        return replace(scores, q=moved(scores.q), k=moved(scores.k), lead=torch.Size(lead[dim] for dim in order))

    def _hiding(self, added: Sequence[Tensor]) -> Tensor | None:
        if not added and not self.hidden:
            return None
        total = reduce(add, added) if added else torch.zeros(1, 1, device=self.q.device)
        least = torch.finfo(total.dtype).min
        hidden = reduce(or_, (*self.hidden, *(x <= MAX_HIDDEN_SCORE for x in added))) & (total > -torch.inf)
        if not self.hidden and not bool((hidden & (total > least / 2)).any()):
            return total
        return torch.where(hidden, least if self.finite else -torch.inf, total)

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> Scores:
        zeroed = None if self.zeroed is None else fn(self.zeroed)
        return replace(self, added=tuple(map(fn, self.added)), hidden=tuple(map(fn, self.hidden)), zeroed=zeroed)


@dataclass(frozen=True, eq=False)
class ScoresWithSink:
    """What a tensor is: scores and one more column, the first or the last, of logits that nothing is read by."""

    scores: Scores
    column: Tensor  # as it was, *lead i 1
    last: bool
    shifted: bool = False  # was something added to whole rows since?

    @classmethod
    def of(cls, scores: Scores, x: Tensor, *, last: bool) -> ScoresWithSink:
        """Scores in a tensor x."""
        return cls(scores, (x[..., -1:] if last else x[..., :1]).clone(), last)

    def keys(self, x: Tensor) -> Tensor:
        """Of such a tensor what belongs to keys."""
        return x[..., :-1] if self.last else x[..., 1:]

    def softmaxed(self, x: Tensor) -> SoftmaxOutput:
        """The softmax of such a tensor, with all that it is of as it was before rows were shifted."""
        logits = self.keys(x)
        if self.shifted:
            logits = logits + (self.column - (x[..., -1:] if self.last else x[..., :1]))
        return SoftmaxOutput(self.scores, logits, 0, sink=self.column.expand_as(logits), sunk=self)


@dataclass(frozen=True, eq=False)
class SoftmaxOutput:
    """What a tensor is: the softmax of scores."""

    scores: Scores | None  # None where they are more than a product
    logits: Tensor  # as they were handed to the softmax, keys in the last dim
    behind: int  # how many dims the tensor has behind its keys
    is_attention: bool = False  # are they scores of queries and keys, whatever was done to them?
    is_gate: bool = False  # are they features of a linear map, one for each of some experts?
    found: Tensor | None = None  # what the softmax made of them, keys last; None where that is the tensor
    reweighed: bool = False  # was something done to these after the softmax?
    sink: Tensor | None = None  # a logit of each row besides, as often as there are keys
    sunk: ScoresWithSink | None = None  # how the weight of that logit stands beside the others, as long as it does
    averaged: list[bool] = field(default_factory=list)  # was it multiplied with values?

    def weights_in(self, x: Tensor) -> Tensor:
        """The weights that the softmax found, keys last, where x is the tensor."""
        return self.found if self.found is not None else self.keys_last(x)

    def keys_last(self, x: Tensor) -> Tensor:
        """The tensor with its keys in the last dim."""
        return x.movedim(-1 - self.behind, -1) if self.behind else x

    def permute_batch_dims(self, shape: torch.Size, order: Sequence[int]) -> SoftmaxOutput:
        """With its batch dims in another order, where it has a `shape` of *lead i j."""
        scores, lead = self.scores, shape[:-2]
        kept = (
            scores.permute_batch_dims(shape, order) if scores is not None and prod(scores.lead) == prod(lead) else None
        )
        found, sink = (
            None if x is None else permute_batch_dims(x.reshape(shape), order) for x in (self.found, self.sink)
        )
        return replace(
            self, scores=kept, logits=permute_batch_dims(self.logits.reshape(shape), order), found=found, sink=sink
        )


class WeightedValues(NamedTuple):
    """What a tensor is: values, each times its weight, not yet summed."""

    softmaxed: SoftmaxOutput
    weights: Tensor  # one for each value, the same for all its features: their last dim is 1
    values: Tensor
    key: int  # the dim of keys, from behind

    @classmethod
    def of(cls, softmaxed: SoftmaxOutput, weights: Tensor, values: Any) -> WeightedValues | None:
        """The product of two tensors, if each of one's last rows is weighed by one number of the other."""
        if not isinstance(values, Tensor) or values.ndim != weights.ndim or not softmaxed.behind:
            return None
        if weights.shape[-1] > 1 and weights.stride(-1) == 0:
            weights = weights[..., :1]
        key, wide = -1 - softmaxed.behind, values.shape[-1] > 1 == weights.shape[-1]
        fits = wide and values.shape[key] == weights.shape[key] and weights.numel() == softmaxed.logits.numel()
        return cls(softmaxed, weights, values, key) if fits else None

    def average(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Average | None:
        """What a sum makes of it: an average where it is over the keys, and dims match but for one of queries."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        ndim = self.values.ndim
        if not isinstance(dim, int) or dim % ndim != self.key % ndim:
            return None
        pairs = [(x, y) for n, (x, y) in enumerate(self._sizes()) if n not in (dim % ndim, ndim - 1)]
        rows = [n for n, (x, y) in enumerate(pairs) if x > y == 1]
        if len(rows) > 1 or any(x < y for x, y in pairs):
            return None
        v = self.values.movedim(dim, -2)
        shape = [x for x, _ in pairs]

        def rowed(x: Tensor) -> Tensor:
            return x.movedim(rows[0], -2) if rows else x.unsqueeze(-2)

        return Average(
            v.squeeze(rows[0]) if rows else v,
            lambda out: rowed(out.reshape(*shape, -1)),
            lambda x: rowed(x.squeeze(-2)),
            summed=True,
        )

    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.weights.shape, self.values.shape, strict=True))
