"""Exponentials: weights exp(scores) before each row is divided by its sum, as models write a softmax by hand.

    e = exp(scores - scores.max(-1, keepdim=True).values)
    weights = e / e.sum(-1, keepdim=True)

The divisor is compared with the sums of the rows: if they are equal the quotient is a softmax, and if the divisor is
larger by exp(sink) it is a softmax with a sink. So it does not matter how a model computes the divisor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from ...ops.terms.normalizers import SinkSoftmax
from ..interception.func_transforms import is_true_everywhere
from .head_layout import with_batch_dims
from .matmul import Average
from .symbolic_scores import Scores, SoftmaxOutput

TOLERANCE, HALF_TOLERANCE = 1e-5, 0.02  # relative error of a divisor, in float32 and half precision


@dataclass(frozen=True, eq=False)
class Exponentials:
    """A tensor exp(s), not divided by a number per row yet."""

    scores: Scores | None  # None if the exponents are not known as a product and terms
    exponents: Tensor | None = None  # None if the tensor was changed since: then its logarithm
    averaged: list[bool] = field(default_factory=list)  # not empty once values were multiplied and divided

    def without(self, hidden: Tensor, lead: torch.Size) -> Exponentials:
        """Return exponentials that were set to 0 where `hidden` is True."""
        scores = None if self.scores is None else self.scores.without(hidden, lead, by=-torch.inf)
        return replace(self, scores=scores, exponents=None)

    def as_weights(self, e: Tensor) -> SoftmaxOutput | None:
        """Return the tensor e of this value as a softmax if the sums over its keys are 1 already."""
        for behind in range(min(2, e.ndim)):
            divisor = torch.ones_like(e.select(-1 - behind, 0))
            if (weights := self._softmax(e, divisor, behind)) is not None and weights.normalize is None:
                return weights
        return None

    def divide(self, e: Tensor, divisor: Tensor) -> SoftmaxOutput | None:
        """Return e / divisor as weights, with e the tensor of this value; None if these are no weights over keys."""
        divisor = divisor[(None,) * (e.ndim - divisor.ndim)]
        keys = [n for n in range(-e.ndim, 0) if divisor.shape[n] == 1 < e.shape[n]]
        if len(keys) > 1 or (not keys and divisor.shape[-1] != 1):
            return None
        key = keys[0] if keys else -1
        weights = self._softmax(e, divisor.squeeze(key), -1 - key)
        if weights is None and self.scores is not None:  # weights, but no softmax
            behind = -1 - key
            logits, scores = self._exponents(e, behind), self._scores(e, behind)
            return SoftmaxOutput(scores, logits, behind, changes=("scaled",), averaged=self.averaged)
        return weights

    def _softmax(self, e: Tensor, divisor: Tensor, behind: int) -> SoftmaxOutput | None:
        """Return e / divisor if it is a softmax over keys with `behind` dims behind them; the divisor has no keys."""
        total = e.sum(-1 - behind, dtype=torch.promote_types(e.dtype, torch.float32))
        divisor = divisor.to(total.dtype)
        extra, tolerance = divisor - total, divisor * (HALF_TOLERANCE if e.dtype.itemsize <= 2 else TOLERANCE)
        logits, scores = self._exponents(e, behind), self._scores(e, behind)
        if is_true_everywhere(extra.abs() <= tolerance):
            return SoftmaxOutput(scores, logits, behind, averaged=self.averaged)
        if scores is None or not is_true_everywhere(extra >= -tolerance):
            return None
        lead = logits.shape[:-2]
        shift = scores.shift
        if isinstance(shift, Tensor):
            shift = with_batch_dims(shift, scores.lead, lead)
        extra = extra.clamp(min=divisor * torch.finfo(total.dtype).eps)[..., None]
        if is_true_everywhere((extra - torch.as_tensor(shift).exp()).abs() <= tolerance[..., None]):
            return SoftmaxOutput(scores, logits - shift, behind, normalize=SinkSoftmax(0.0), averaged=self.averaged)
        shift = shift - extra.log()
        scores = scores.with_row_shift(with_batch_dims(shift, lead, scores.lead))
        return SoftmaxOutput(scores, logits - extra.log(), behind, normalize=SinkSoftmax(0.0), averaged=self.averaged)

    def _exponents(self, e: Tensor, behind: int) -> Tensor:
        """Return the exponents, keys last."""
        exponents = e.log() if self.exponents is None else self.exponents
        return exponents.movedim(-1 - behind, -1) if behind else exponents

    def _scores(self, e: Tensor, behind: int) -> Scores | None:
        """Return the scores with their keys in the last dim; None if e is no longer one matrix for each of theirs."""
        if self.scores is None or behind > 1 or prod(e.shape[:-2]) != prod(self.scores.lead):
            return None
        return self.scores.mT if behind else self.scores


@dataclass(frozen=True, eq=False)
class UndividedAverage:
    """A product exp(s) @ v, before its rows are divided by the sums of exp(s)."""

    exponentials: Exponentials
    e: Tensor
    values: Tensor | None
    average: Average
    average_of: Callable[[Tensor, Tensor], Average | None]  # the same call of other weights and values

    @property
    def averaged(self) -> list[bool]:
        """A list that is not empty once the rows were divided."""
        return self.exponentials.averaged

    def divide(self, divisor: Tensor) -> tuple[SoftmaxOutput, Tensor] | None:
        """Return the softmax that makes this product an average once it is divided, and its weights."""
        if divisor.shape != (*self.e.shape[:-1], 1):
            return None
        weights = self.exponentials.divide(self.e, divisor)
        return None if weights is None else (weights, self.e / divisor)
