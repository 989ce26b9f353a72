"""Hypothesis: one sequence that a search returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A sequence of tokens that was searched, sampled or scored, with its score and log-probabilities.

    The tokens are those after the prefix, with the end token if it was chosen. The search ranks by the score. The
    log-probabilities, one per token, and their sum are those of the model, without constraints or temperature.
    `finished` is False for a hypothesis that was cut off at `max_length`.
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
        """Return for each token the source position with the largest attention, by the mean over heads."""
        if name not in self.attention:
            raise ValueError(f"name must be one of {sorted(self.attention)}, got {name!r}")
        return tuple(self.attention[name].mean(0).argmax(-1).tolist())
