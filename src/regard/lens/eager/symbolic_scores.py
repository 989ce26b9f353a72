"""Scores as what they are made of: queries, keys, and what was done to their products; and the softmax of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import add, or_

import torch
from torch import Tensor

from ..recording.store import version_of
from .head_layout import Layout, both, led, matrix, permuted
from .matmul import Product

HIDES = -1e4  # a score filled with this or less gets no weight


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
    def of(cls, found: Product) -> Scores:
        lead = both(found.left.shape[:-2], found.right.shape[:-2])
        added = () if found.added is None else (found.added,)
        given = tuple((x, version_of(x)) for x in (found.left, found.right, *added))
        return cls(found.left, found.right, lead, found.scale, added, given=given)

    @property
    def are_as_they_were(self) -> bool:
        """Has nobody written to what they were made of since?"""
        return all(version_of(x) == version for x, version in self.given)

    @property
    def mT(self) -> Scores:
        """The same with queries and keys in each other's place."""
        return replace(self._mapped(lambda x: x.mT), q=self.k, k=self.q)

    def times(self, factor: float | Tensor, lead: torch.Size) -> Scores:
        """Multiplied, by a number or by one for each row, in a tensor whose batch dims are `lead`."""
        if isinstance(factor, Tensor):
            factor = led(matrix(factor), lead, self.lead)
            return replace(self, q=self.q * factor, added=tuple(x * factor for x in self.added))
        return replace(self, scale=self.scale * factor, added=tuple(x * factor for x in self.added))

    def plus(self, x: Tensor, lead: torch.Size) -> Scores:
        """With numbers added; one for a whole row changes no weights."""
        given = (*self.given, (x, version_of(x)))
        x = led(matrix(x if x.is_floating_point() else x.to(self.q.dtype)), lead, self.lead)
        if self.zeroed is not None and bool((~self.zeroed | (x <= HIDES)).all()):
            x = torch.where(self.zeroed, 0, x)
            return replace(self, added=(*self.added, x), hidden=(*self.hidden, self.zeroed), zeroed=None, given=given)
        if x.shape[-1] == 1 < self.k.shape[-2]:
            return self
        return replace(self, added=(*self.added, x), given=given)

    def gated(self, factor: Tensor, lead: torch.Size) -> Scores | None:
        """Multiplied by a 1 or a 0 for each of them."""
        factor = led(matrix(factor), lead, self.lead)
        closed = factor == 0
        return replace(self, zeroed=closed) if self.zeroed is None and bool((closed | (factor == 1)).all()) else None

    def without(self, hidden: Tensor, lead: torch.Size, *, by: float) -> Scores:
        """With some of them hidden."""
        hides, given = (*self.hidden, led(matrix(hidden), lead, self.lead)), (*self.given, (hidden, version_of(hidden)))
        return replace(self, hidden=hides, finite=self.finite and by > -torch.inf, given=given)

    def led(self, lead: torch.Size) -> Scores:
        """With other batch dims for the same matrices."""
        if lead == self.lead:
            return self
        moved = self._mapped(lambda x: led(x, self.lead, lead))
        return replace(moved, q=led(self.q, self.lead, lead), k=led(self.k, self.lead, lead), lead=lead)

    def laid(self, layout: Layout) -> Scores:
        """With batch dims b h, to be told."""
        return replace(self._mapped(layout.of_matrices), q=layout.of_matrices(self.q), k=layout.of_matrices(self.k))

    def terms(self) -> dict[str, Tensor]:
        """What hides, with what is added there, as `mask`, and what is added besides as `bias`, both numbers."""
        hiding = [x for x in self.added if bool((x <= HIDES).any())]
        beside = [x for x in self.added if not any(x is other for other in hiding)]
        mask, bias = self._hiding(hiding), reduce(add, beside) if beside else None
        return {name: x for name, x in (("mask", mask), ("bias", bias)) if x is not None}

    def permuted(self, shape: torch.Size, order: Sequence[int]) -> Scores:
        """With its batch dims in another order, where it has a `shape` of *lead i j."""
        lead = shape[:-2]

        def moved(x: Tensor) -> Tensor:
            return permuted(x.expand(*lead, *x.shape[-2:]), order)

        scores = self.led(lead)._mapped(moved)
        return replace(scores, q=moved(scores.q), k=moved(scores.k), lead=torch.Size(lead[dim] for dim in order))

    def _hiding(self, added: Sequence[Tensor]) -> Tensor | None:
        if not added and not self.hidden:
            return None
        total = reduce(add, added) if added else torch.zeros(1, 1, device=self.q.device)
        least = torch.finfo(total.dtype).min
        hidden = reduce(or_, (*self.hidden, *(x <= HIDES for x in added))) & (total > -torch.inf)
        if not self.hidden and not bool((hidden & (total > least / 2)).any()):
            return total
        return torch.where(hidden, least if self.finite else -torch.inf, total)

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> Scores:
        zeroed = None if self.zeroed is None else fn(self.zeroed)
        return replace(self, added=tuple(map(fn, self.added)), hidden=tuple(map(fn, self.hidden)), zeroed=zeroed)


@dataclass(frozen=True, eq=False)
class Sunk:
    """What a tensor is: scores and one more column, the first or the last, of logits that nothing is read by."""

    scores: Scores
    column: Tensor  # as it was, *lead i 1
    last: bool
    shifted: bool = False  # was something added to whole rows since?

    @classmethod
    def of(cls, scores: Scores, x: Tensor, *, last: bool) -> Sunk:
        """Scores in a tensor x."""
        return cls(scores, (x[..., -1:] if last else x[..., :1]).clone(), last)

    def keys(self, x: Tensor) -> Tensor:
        """Of such a tensor what belongs to keys."""
        return x[..., :-1] if self.last else x[..., 1:]

    def softmaxed(self, x: Tensor) -> Softmaxed:
        """The softmax of such a tensor, with all that it is of as it was before rows were shifted."""
        logits = self.keys(x)
        if self.shifted:
            logits = logits + (self.column - (x[..., -1:] if self.last else x[..., :1]))
        return Softmaxed(self.scores, logits, 0, sink=self.column.expand_as(logits), sunk=self)


@dataclass(frozen=True, eq=False)
class Softmaxed:
    """What a tensor is: the softmax of scores."""

    scores: Scores | None  # None where they are more than a product
    logits: Tensor  # as they were handed to the softmax, keys in the last dim
    behind: int  # how many dims the tensor has behind its keys
    paired: bool = False  # are they scores of queries and keys, whatever was done to them?
    gate: bool = False  # are they features of a linear map, one for each of some experts?
    found: Tensor | None = None  # what the softmax made of them, keys last; None where that is the tensor
    reweighed: bool = False  # was something done to these after the softmax?
    sink: Tensor | None = None  # a logit of each row besides, as often as there are keys
    sunk: Sunk | None = None  # how the weight of that logit stands beside the others, as long as it does
    seen: list[bool] = field(default_factory=list)  # was it multiplied with values?

    def found_in(self, x: Tensor) -> Tensor:
        """The weights that the softmax found, keys last, where x is the tensor."""
        return self.found if self.found is not None else self.keys_last(x)

    def keys_last(self, x: Tensor) -> Tensor:
        """The tensor with its keys in the last dim."""
        return x.movedim(-1 - self.behind, -1) if self.behind else x

    def permuted(self, shape: torch.Size, order: Sequence[int]) -> Softmaxed:
        """With its batch dims in another order, where it has a `shape` of *lead i j."""
        scores, lead = self.scores, shape[:-2]
        kept = scores.permuted(shape, order) if scores is not None and prod(scores.lead) == prod(lead) else None
        found, sink = (None if x is None else permuted(x.reshape(shape), order) for x in (self.found, self.sink))
        return replace(self, scores=kept, logits=permuted(self.logits.reshape(shape), order), found=found, sink=sink)
