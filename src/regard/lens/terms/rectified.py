"""Rectified: the normalizer of ReLU attention and squared ReLU attention, as models write them out."""

from __future__ import annotations

from torch import Tensor

from ...checks import check_number
from ...ops.terms.coordinates import Coordinates
from ...ops.terms.normalizers import Normalizer
from ...ops.terms.term import term


@term
class Rectified(Normalizer):
    """factor * max(s, 0) ^ power: each entry by itself, no row statistic (Wortsman et al. 2023; Hua et al. 2022)."""

    power: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_number("Rectified power", self.power)
        check_number("Rectified factor", self.factor)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        over = s.clamp(min=0)
        return (over if self.power == 1 else over**self.power) * self.factor

    def times(self, number: float) -> Rectified:
        """Return the normalizer of the weights times a number."""
        return Rectified(self.power, self.factor * number)

    def raise_to(self, power: float) -> Rectified:
        """Return the normalizer of the weights to a power."""
        return Rectified(self.power * power, self.factor**power)
