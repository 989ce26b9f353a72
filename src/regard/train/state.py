"""State: how far a run has come."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from .dataclass_json import check_types
from .recipe import Recipe

WORST = sys.float_info.max  # stands for what is no number, or infinite: JSON has neither


@dataclass(kw_only=True)
class State:
    """How far a run has come, and all that its future depends on besides weights, moments, data and generators."""

    step: int = 0  # updates made
    epoch: int = 0
    batch: int = 0  # batches eaten of this epoch; 0 is the border between two
    sum: float = 0.0  # the loss since the last row of the log
    count: float = 0.0
    evaluated: tuple[int, ...] = ()  # the steps that were, and their scores: lower is better
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def best(self) -> int | None:
        """The first step with the lowest score."""
        return self.evaluated[self.scores.index(min(self.scores))] if self.scores else None

    @property
    def lowest(self) -> float | None:
        """The lowest score, NaN where none was below infinity."""
        if not self.scores:
            return None
        cost = min(self.scores)
        return math.nan if cost == WORST else -math.inf if cost == -WORST else cost

    @property
    def worse(self) -> int:
        """Evaluations since the best."""
        return len(self.scores) - 1 - self.scores.index(min(self.scores)) if self.scores else 0

    def finished(self, recipe: Recipe) -> str | None:
        """Why the run is over, None while it is not."""
        if recipe.steps is not None and self.step >= recipe.steps:
            return "steps"
        if recipe.epochs is not None and self.epoch >= recipe.epochs:
            return "epochs"
        return "patience" if recipe.patience is not None and self.worse >= recipe.patience else None

    def due(self, every: int | None) -> bool:
        """Has the run come to a step that is a multiple of `every`, or with None to the border of an epoch?"""
        return self.step > 0 and (self.batch == 0 if every is None else self.step % every == 0)

    def score(self, value: float, recipe: Recipe) -> None:
        """Note the watched metric of this step; what is not a number is worse than every number."""
        cost = value if recipe.better == "lower" else -value
        self.evaluated += (self.step,)
        self.scores += (WORST if math.isnan(cost) else min(max(cost, -WORST), WORST),)

    def forget_scores(self) -> None:
        """Seek the best anew: scores of one metric, or on some data, say nothing about those of another."""
        self.evaluated = self.scores = ()
