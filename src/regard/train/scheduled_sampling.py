"""Scheduled sampling: how likely a decoder is fed the true token rather than its own (Bengio et al. 2015, section 2.4).

Functions of the number of updates made so far, from 1 (always the truth) downward. `fit` hands their value to
`model.loss(batch, forcing=...)`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from .dataclass_json import check_types


@dataclass(frozen=True)
class Linear:
    """From 1 in a straight line down to `lowest`, reached after `steps` updates.

    >>> [Linear(steps=4, lowest=0.5)(step) for step in (0, 2, 4, 99)]
    [1.0, 0.75, 0.5, 0.5]
    """

    _: KW_ONLY
    steps: int
    lowest: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0 <= self.lowest <= 1:
            raise ValueError(f"lowest must be a probability, got {self.lowest}")

    def __call__(self, step: int) -> float:
        return max(self.lowest, 1.0 - (1.0 - self.lowest) * step / self.steps)


@dataclass(frozen=True)
class Exponential:
    """k ** step, with k below 1."""

    k: float

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.k < 1:
            raise ValueError(f"k must be between 0 and 1, got {self.k}; 0.999 falls to one half in 693 steps")

    def __call__(self, step: int) -> float:
        return self.k**step


@dataclass(frozen=True)
class InverseSigmoid:
    """k / (k + exp(step / k)), with k at least 1: one half at step k log k."""

    k: float

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.k < math.inf:
            raise ValueError(f"k must be at least 1, got {self.k}; the curve falls through one half at k log k steps")

    def __call__(self, step: int) -> float:
        # The same quotient through exp of a number below 0, which cannot overflow.
        log_odds = step / self.k - math.log(self.k)
        return 1 / (1 + math.exp(log_odds)) if log_odds < 0 else math.exp(-log_odds) / (1 + math.exp(-log_odds))


Forcing = Linear | Exponential | InverseSigmoid
