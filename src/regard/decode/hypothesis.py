"""Hypothesis: one sequence a search came back with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A sequence of tokens that was chosen, sampled or scored, and what the model thought of it.

    The tokens are those that follow the prefix, the end among them if it came. The score is what the search ranked
    by; the log-probabilities, one a token, and their sum are the model's own, whatever was forbidden or tempered.
    `finished` is False for one that was cut off at `max_length`.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    log_probabilities: tuple[float, ...] = field(repr=False)
    finished: bool
    attention: Mapping[str, Float[Tensor, "heads tokens source"]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def alignment(self, name: str) -> tuple[int, ...]:
        """For each token the source position it was most attended to from, by the mean over heads."""
        if name not in self.attention:
            raise ValueError(f"name must be one of {sorted(self.attention)}, got {name!r}")
        return tuple(self.attention[name].mean(0).argmax(-1).tolist())
