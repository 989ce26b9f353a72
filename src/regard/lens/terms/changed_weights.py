"""Weights that a model changed after the softmax: normalizers that scale them, or that hold the final numbers.

A tape keeps the weights that multiply the values. If the model only scaled the softmax, by rows or by keys, `Scaled`
stands for them in memory linear in the sequence; `Given` holds any other weights as a dense tensor, queries x keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...checks import check_broadcast, check_tensor
from ...ops.shape import Sizes
from ...ops.terms.coordinates import Coordinates
from ...ops.terms.normalizers import Normalizer
from ...ops.terms.term import term


@term
class Given(Normalizer):
    """weights[b, h, i, j]: the weights themselves, whatever the scores are. Rows need not sum to 1.

    A key that a mask hides has weight 0.
    """

    weights: Tensor

    signed: ClassVar[bool] = True
    has_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_tensor("Given weights", self.weights)

    def check(self, sizes: Sizes) -> None:
        _check_fits("Given weights", self.weights, sizes)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        return torch.where(s == -torch.inf, 0.0, at.slice_of(self.weights, "bhij").to(at.dtype))


@term
class Scaled(Normalizer):
    """inner(s) * factor, a tensor that broadcasts to b h i j: gates of heads, queries or keys after the softmax."""

    inner: Normalizer
    factor: Tensor

    signed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tensor("Scaled factor", self.factor)
        if not isinstance(self.inner, Normalizer):
            raise TypeError(f"Scaled takes a normalizer and a tensor, got {self.inner!r}; write Scaled(Softmax(), x)")

    def check(self, sizes: Sizes) -> None:
        self.inner.check(sizes)
        _check_fits("Scaled factor", self.factor, sizes)

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor | None:
        return self.inner.statistic(s, at)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        return self.inner.map(s, statistic, at) * self._over(at)

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor | None]:
        weights, statistic = self.inner.weigh(s, at)
        return weights * self._over(at), statistic

    def _over(self, at: Coordinates) -> Tensor:
        return at.slice_of(self.factor, "bhij").to(at.dtype)


def holds_for_all_rows(normalize: Normalizer | None) -> bool:
    """True unless a normalizer has numbers of its own for single queries, keys or batch rows."""
    if isinstance(normalize, Scaled):
        b, _, i, j = (1,) * (4 - normalize.factor.ndim) + tuple(normalize.factor.shape)
        return b == i == j == 1 and holds_for_all_rows(normalize.inner)
    return not isinstance(normalize, Given)


def _check_fits(name: str, x: Tensor, sizes: Sizes) -> None:
    check_broadcast(name, x, {"b": sizes.b, "h": sizes.h, "i": sizes.i, "j": sizes.j})
