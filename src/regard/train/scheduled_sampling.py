"""Scheduled sampling: the probability of feeding a decoder the true token, not its own (Bengio et al. 2015, 2.4).

Schedules are functions of the number of updates so far, falling from 1 (always the true token). `fit` passes their
value to `model.loss(batch, forcing=...)`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from .dataclass_json import check_types


@dataclass(frozen=True)
class LinearSchedule:
    """Linear from 1 down to `lowest`, reached after `steps` updates.

    >>> [LinearSchedule(steps=4, lowest=0.5)(step) for step in (0, 2, 4, 99)]
    [1.0, 0.75, 0.5, 0.5]
    """

    stored_name: ClassVar[str] = "Linear"

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
    """k / (k + exp(step / k)), with k at least 1; equals 1/2 at step k log k."""

    k: float

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.k < math.inf:
            raise ValueError(f"k must be at least 1, got {self.k}; the schedule reaches one half at step k log k")

    def __call__(self, step: int) -> float:
        # The quotient is rewritten with exp of a negative number, which cannot overflow.
        log_odds = step / self.k - math.log(self.k)
        return 1 / (1 + math.exp(log_odds)) if log_odds < 0 else math.exp(-log_odds) / (1 + math.exp(-log_odds))


Forcing = LinearSchedule | Exponential | InverseSigmoid
