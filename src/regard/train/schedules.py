"""Learning rates as functions of the step: `rate(step)`, and for `Plateau` of the validation scores so far.

Schedules have no state, so a resumed run cannot restart its learning rate by mistake. Steps count from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from .dataclass_json import check_types


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over `warmup` steps, then constant at `peak`.

    >>> [Constant(0.5, warmup=2)(step) for step in (1, 2, 3)]
    [0.25, 0.5, 0.5]
    """

    peak: float
    _: KW_ONLY
    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int, scores: Sequence[float] = ()) -> float:
        return self.peak * _warmup_factor(step, self.warmup)


@dataclass(frozen=True)
class InverseSquareRoot:
    """peak * min(step / warmup, sqrt(warmup / step)): Vaswani et al. 2017, section 5.3, parametrized by its peak.

    Their formula for width d has peak 1 / sqrt(d * warmup).
    """

    peak: float
    _: KW_ONLY
    warmup: int

    def __post_init__(self) -> None:
        _check(self)
        if self.warmup < 1:
            raise ValueError(f"warmup must be at least 1, got {self.warmup}; the rate falls after the warm-up")

    def __call__(self, step: int, scores: Sequence[float] = ()) -> float:
        return self.peak * min(step / self.warmup, math.sqrt(self.warmup / step))


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up to `peak`, then half a cosine down to `lowest` at step `steps`, and constant after it.

    >>> round(CosineSchedule(1.0, steps=100, warmup=20, lowest=0.1)(60), 3)
    0.55

    Loshchilov & Hutter 2017, equation 5, without restarts.
    """

    stored_name: ClassVar[str] = "Cosine"

    peak: float
    _: KW_ONLY
    steps: int
    warmup: int = 0
    lowest: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if self.steps <= self.warmup:
            raise ValueError(f"steps must be more than warmup, got steps={self.steps} and warmup={self.warmup}")
        _check_lowest(self.lowest, self.peak)

    def __call__(self, step: int, scores: Sequence[float] = ()) -> float:
        if step < self.warmup:
            return self.peak * _warmup_factor(step, self.warmup)
        share = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.lowest + (self.peak - self.lowest) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Plateau:
    """`peak`, multiplied by `factor` each time more than `patience` evaluations in a row bring no improvement.

    >>> Plateau(1.0, factor=0.5, patience=1)(9, scores=[3.0, 2.0, 2.5, 2.4])
    0.5

    `scores` are the watched validation metric, oriented so that lower is better.
    """

    peak: float
    _: KW_ONLY
    warmup: int = 0
    factor: float = 0.5
    patience: int = 2
    lowest: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must be between 0 and 1, got {self.factor}")
        if self.patience < 0:
            raise ValueError(f"patience must be at least 0, got {self.patience}")
        _check_lowest(self.lowest, self.peak)

    def __call__(self, step: int, scores: Sequence[float] = ()) -> float:
        best, worse, falls = math.inf, 0, 0
        for score in scores:
            best, worse = (score, 0) if score < best else (best, worse + 1)
            if worse > self.patience:
                falls, worse = falls + 1, 0
        return max(self.lowest, self.peak * self.factor**falls) * _warmup_factor(step, self.warmup)


Schedule = Constant | InverseSquareRoot | CosineSchedule | Plateau


def _warmup_factor(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def _check(schedule: Schedule) -> None:
    check_types(schedule)
    if not 0 < schedule.peak < math.inf:
        raise ValueError(f"peak must be a rate above 0, got {schedule.peak}")
    if schedule.warmup < 0:
        raise ValueError(f"warmup must be at least 0 steps, got {schedule.warmup}")


def _check_lowest(lowest: float, peak: float) -> None:
    if not 0 <= lowest <= peak:
        raise ValueError(f"lowest must be between 0 and peak={peak}, got {lowest}")
