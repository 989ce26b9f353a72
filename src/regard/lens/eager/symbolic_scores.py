"""Symbolic values of tensors in eager attention: scores as q, k and terms, their softmax, and weighted values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import add, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.terms.normalizers import Normalizer, SinkSoftmax
from ..recording.store import version_of
from .head_layout import HeadLayout, as_matrix, common_batch_dims, permute_batch_dims, with_batch_dims
from .matmul import Average, MatrixProduct

MAX_HIDDEN_SCORE = -1e4  # a fill value of at most this hides its key


@dataclass(frozen=True, eq=False)
class Scores:
    """A tensor of scores: scale * q @ k.mT + sum(added), with hidden keys."""

    q: Tensor  # *lead i d
    k: Tensor  # *lead j d
    lead: torch.Size
    scale: float = 1.0
    added: tuple[Tensor, ...] = ()  # each broadcasts to *lead i j
    hidden: tuple[Tensor, ...] = ()  # each broadcasts to *lead i j, True = hidden
    finite: bool = True  # hidden by finite numbers: a fully masked row is uniform, not NaN
    inputs: tuple[tuple[Tensor, int | None], ...] = ()  # the tensors it was computed from, and their versions
    zeroed: Tensor | None = (
        None  # True where the scores were multiplied by 0, before a large negative number hides them
    )
    shift: float | Tensor = 0.0  # added to each row, broadcasts to *lead i 1; a softmax ignores it

    @classmethod
    def of(cls, product: MatrixProduct) -> Scores:
        """Return the result of a matrix product as scores."""
        lead = common_batch_dims(product.left.shape[:-2], product.right.shape[:-2])
        added = () if product.added is None else (product.added,)
        inputs = tuple((x, version_of(x)) for x in (product.left, product.right, *added))
        return cls(product.left, product.right, lead, product.scale, added, inputs=inputs)

    @property
    def inputs_are_unmodified(self) -> bool:
        """Whether no tensor that the scores were computed from was written to since."""
        return all(version_of(x) == version for x, version in self.inputs)

    @property
    def mT(self) -> Scores:
        """The transposed scores: queries and keys swapped."""
        turned = replace(self.map_terms(lambda x: x.mT), q=self.k, k=self.q)
        rows = [x for x in turned.added if x.shape[-1] == 1 < turned.k.shape[-2]]
        added = tuple(x for x in turned.added if not any(x is row for row in rows))
        if isinstance(turned.shift, Tensor):
            added, shift = (*added, turned.shift), reduce(add, rows) if rows else 0.0
        else:
            shift = reduce(add, rows, turned.shift)
        return replace(turned, added=added, shift=shift)

    def times(self, factor: float | Tensor, lead: torch.Size) -> Scores:
        """Multiply by a number, or by one number per row in a tensor with batch dims `lead`."""
        if isinstance(factor, Tensor):
            factor = with_batch_dims(as_matrix(factor), lead, self.lead)
            return replace(
                self, q=self.q * factor, added=tuple(x * factor for x in self.added), shift=self.shift * factor
            )
        added = tuple(x * factor for x in self.added)
        return replace(self, scale=self.scale * factor, added=added, shift=self.shift * factor)

    def plus(self, x: Tensor, lead: torch.Size) -> Scores:
        """Add a tensor with batch dims `lead`; one number per row becomes part of the shift."""
        inputs = (*self.inputs, (x, version_of(x)))
        x = with_batch_dims(as_matrix(x if x.is_floating_point() else x.to(self.q.dtype)), lead, self.lead)
        if self.zeroed is not None and bool((~self.zeroed | (x <= MAX_HIDDEN_SCORE)).all()):
            x = torch.where(self.zeroed, 0, x)
            return replace(self, added=(*self.added, x), hidden=(*self.hidden, self.zeroed), zeroed=None, inputs=inputs)
        if x.shape[-1] == 1 < self.k.shape[-2]:
            return replace(self, shift=self.shift + x)
        return replace(self, added=(*self.added, x), inputs=inputs)

    def plus_number(self, number: float | Tensor) -> Scores:
        """Add one number, also in a tensor of one element, to all scores."""
        number = number.reshape(1, 1) if isinstance(number, Tensor) else number
        return replace(self, shift=self.shift + number)

    def with_row_shift(self, shift: float | Tensor) -> Scores:
        """Return scores whose product has `shift` in it, one number per row: q and k get one more feature."""
        lead = self.q.shape[:-2]
        if isinstance(shift, Tensor):
            lead = common_batch_dims(lead, as_matrix(shift).shape[:-2])
        rows = torch.as_tensor(shift, dtype=self.q.dtype, device=self.q.device) / self.scale
        q = torch.cat((self.q.expand(*lead, *self.q.shape[-2:]), rows.expand(*lead, self.q.shape[-2], 1)), -1)
        return replace(self, q=q, k=torch.cat((self.k, torch.ones_like(self.k[..., :1])), -1), shift=0.0)

    def times_zero_or_one(self, factor: Tensor, lead: torch.Size) -> Scores | None:
        """Multiply each score by 0 or 1; None if the factor holds other numbers."""
        factor = with_batch_dims(as_matrix(factor), lead, self.lead)
        is_zero = factor == 0
        return replace(self, zeroed=is_zero) if self.zeroed is None and bool((is_zero | (factor == 1)).all()) else None

    def without(self, hidden: Tensor, lead: torch.Size, *, by: float) -> Scores:
        """Hide scores, by filling them with the number `by`."""
        inputs = (*self.inputs, (hidden, version_of(hidden)))
        hides = (*self.hidden, with_batch_dims(as_matrix(hidden), lead, self.lead))
        return replace(self, hidden=hides, finite=self.finite and by > -torch.inf, inputs=inputs)

    def with_batch_dims(self, lead: torch.Size) -> Scores:
        """Return the same matrices with other batch dims."""
        if lead == self.lead:
            return self
        scores = self.map_terms(lambda x: with_batch_dims(x, self.lead, lead))
        q, k = with_batch_dims(self.q, self.lead, lead), with_batch_dims(self.k, self.lead, lead)
        return replace(scores, q=q, k=k, lead=lead)

    def in_layout(self, layout: HeadLayout) -> Scores:
        """Return the scores with batch dims b h."""
        return replace(self.map_terms(layout.of_matrices), q=layout.of_matrices(self.q), k=layout.of_matrices(self.k))

    def mask_and_bias(self) -> dict[str, Tensor]:
        """Return additive tensors: `mask` is the sum of tensors that hide keys, `bias` the sum of the others."""
        masks = [x for x in self.added if bool((x <= MAX_HIDDEN_SCORE).any())]
        biases = [x for x in self.added if not any(x is mask for mask in masks)]
        mask, bias = self._additive_mask(masks), reduce(add, biases) if biases else None
        return {name: x for name, x in (("mask", mask), ("bias", bias)) if x is not None}

    def permute_batch_dims(self, shape: torch.Size, order: Sequence[int]) -> Scores:
        """Return it with its batch dims in another order; its tensor has `shape`, *lead i j."""
        lead = shape[:-2]

        def reorder(x: Tensor) -> Tensor:
            return permute_batch_dims(x.expand(*lead, *x.shape[-2:]), order)

        scores = self.with_batch_dims(lead).map_terms(reorder)
        return replace(scores, q=reorder(scores.q), k=reorder(scores.k), lead=torch.Size(lead[dim] for dim in order))

    def _additive_mask(self, added: Sequence[Tensor]) -> Tensor | None:
        if not added and not self.hidden:
            return None
        if not added and not self.finite:
            return ~reduce(or_, self.hidden)
        total = reduce(add, added) if added else torch.zeros(1, 1, device=self.q.device)
        least = torch.finfo(total.dtype).min
        hidden = reduce(or_, (*self.hidden, *(x <= MAX_HIDDEN_SCORE for x in added))) & (total > -torch.inf)
        if not self.hidden and not bool((hidden & (total > least / 2)).any()):
            return total
        return torch.where(hidden, least if self.finite else -torch.inf, total)

    def map_terms(self, fn: Callable[[Tensor], Tensor]) -> Scores:
        """Return the scores with a function of each term, which broadcasts to the matrices."""
        zeroed = None if self.zeroed is None else fn(self.zeroed)
        shift = fn(self.shift) if isinstance(self.shift, Tensor) else self.shift
        added, hidden = tuple(map(fn, self.added)), tuple(map(fn, self.hidden))
        return replace(self, added=added, hidden=hidden, zeroed=zeroed, shift=shift)


@dataclass(frozen=True, eq=False)
class ScoresWithSink:
    """A tensor of scores and one column, the first or the last, with the logits of an attention sink without value."""

    scores: Scores
    column: Tensor  # *lead i 1, before any shift
    last: bool
    shifted: bool = False  # a number was added to each row since

    @classmethod
    def of(cls, scores: Scores, x: Tensor, *, last: bool) -> ScoresWithSink:
        """Return the symbolic value of a tensor x that holds the scores and the column."""
        return cls(scores, (x[..., -1:] if last else x[..., :1]).clone(), last)

    def keys(self, x: Tensor) -> Tensor:
        """Return a tensor of this form without its sink column."""
        return x[..., :-1] if self.last else x[..., 1:]

    def softmax_output(self, x: Tensor) -> SoftmaxOutput:
        """Return the softmax of a tensor of this form; its logits are those before rows were shifted."""
        logits = self.keys(x)
        if self.shifted:
            logits = logits + (self.column - (x[..., -1:] if self.last else x[..., :1]))
        return SoftmaxOutput(self.scores, logits, 0, sink=self.column.expand_as(logits), with_sink=self)


@dataclass(frozen=True, eq=False)
class SoftmaxOutput:
    """A tensor of attention weights: the softmax of scores, or another normalizer of them."""

    scores: Scores | None  # None if the logits are not known as a product and terms
    logits: Tensor  # input of the softmax, keys in the last dim
    behind: int  # number of dims behind the keys
    is_fixed: bool = False  # the logits are constants
    weights: Tensor | None = None  # output of the softmax, keys last; None if it is the tensor itself
    pair: tuple[int, int] | None = None  # numbers of queries and keys, if the logits are a function of both
    changes: tuple[str, ...] = ()  # what the model did to the weights after the softmax
    is_final: bool = False  # the logits stand for final weights: no softmax gives them
    is_dropped: bool = False  # an active dropout followed; `weights` are those before it
    sink: Tensor | None = None  # logit of the sink of each row, expanded to the shape of the logits
    with_sink: ScoresWithSink | None = None  # the position of the sink column, while the weights have one
    normalize: Normalizer | None = None  # the function of the logits, if it is no softmax
    averaged: list[bool] = field(default_factory=list)  # not empty once values were multiplied; shared by copies

    @property
    def is_elementwise(self) -> bool:
        """Whether each weight is a function of its own score."""
        return self.normalize is not None and not isinstance(self.normalize, SinkSoftmax)

    @property
    def is_attention(self) -> bool:
        """Whether the logits are a function of queries and keys, known or not."""
        return self.pair is not None

    def weights_in(self, x: Tensor) -> Tensor:
        """Return the output of the softmax, keys last; x is the tensor of this value."""
        return self.weights if self.weights is not None else self.keys_last(x)

    def keys_last(self, x: Tensor) -> Tensor:
        """Return the tensor x of this value with its keys in the last dim."""
        return x.movedim(-1 - self.behind, -1) if self.behind else x

    def permute_batch_dims(self, shape: torch.Size, order: Sequence[int]) -> SoftmaxOutput:
        """Return it with its batch dims in another order; its tensor has `shape`, *lead i j."""
        scores, lead = self.scores, shape[:-2]
        kept = (
            scores.permute_batch_dims(shape, order) if scores is not None and prod(scores.lead) == prod(lead) else None
        )
        weights, sink = (
            None if x is None else permute_batch_dims(x.reshape(shape), order) for x in (self.weights, self.sink)
        )
        return replace(
            self, scores=kept, logits=permute_batch_dims(self.logits.reshape(shape), order), weights=weights, sink=sink
        )


class WeightedValues(NamedTuple):
    """A tensor of values times weights, before the sum over keys: `weights.unsqueeze(-1) * values`."""

    softmaxed: SoftmaxOutput
    weights: Tensor  # one per value: the last dim, of features, is 1
    values: Tensor
    key: int  # the dim of the keys, negative

    @classmethod
    def of(cls, softmaxed: SoftmaxOutput, weights: Tensor, values: Any) -> WeightedValues | None:
        """Return the product weights * values if it has one weight per value; None otherwise."""
        if not isinstance(values, Tensor) or values.ndim != weights.ndim or not softmaxed.behind:
            return None
        if weights.shape[-1] > 1 and weights.stride(-1) == 0:
            weights = weights[..., :1]
        key, one_per_value = -1 - softmaxed.behind, values.shape[-1] > 1 == weights.shape[-1]
        fits = one_per_value and values.shape[key] == weights.shape[key] and weights.numel() == softmaxed.logits.numel()
        return cls(softmaxed, weights, values, key) if fits else None

    def average(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Average | None:
        """Return the average that a sum of this tensor is; None unless it sums over the keys only.

        The dims of weights and values must match, except that the values may have 1 where the weights have queries.
        """
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        ndim = self.values.ndim
        if not isinstance(dim, int) or dim % ndim != self.key % ndim:
            return None
        pairs = [(x, y) for n, (x, y) in enumerate(self._size_pairs()) if n not in (dim % ndim, ndim - 1)]
        rows = [n for n, (x, y) in enumerate(pairs) if x > y == 1]
        if len(rows) > 1 or any(x < y for x, y in pairs):
            return None
        v = self.values.movedim(dim, -2)
        shape = [x for x, _ in pairs]

        def with_query_dim(x: Tensor) -> Tensor:
            return x.movedim(rows[0], -2) if rows else x.unsqueeze(-2)

        return Average(
            v.squeeze(rows[0]) if rows else v,
            lambda out: with_query_dim(out.reshape(*shape, -1)),
            lambda x: with_query_dim(x.squeeze(-2)),
            summed=True,
        )

    def _size_pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.weights.shape, self.values.shape, strict=True))
