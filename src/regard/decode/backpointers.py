"""Trace: all candidates of a search, with back-pointers to the rows they extend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .hypothesis import Hypothesis


@dataclass
class SearchStep:
    """The candidates of one step; `kept` are the candidates that became the rows of the next step."""

    parents: Tensor  # the row that each candidate extends
    tokens: Tensor
    gains: Tensor  # log-probability of the token
    attention: Mapping[str, Tensor]  # one entry per row, not per candidate
    kept: Tensor | None = None


class Trace:
    """A tree of candidates, stored step by step; `hypotheses` follows the back-pointers."""

    def __init__(self) -> None:
        self.steps: list[SearchStep] = []

    def add(self, step: SearchStep) -> None:
        """Record the candidates of the next step."""
        self.steps.append(step)

    def hypotheses(
        self, *, steps: Tensor, candidates: Tensor, skip: Tensor, scores: Tensor | None, ends: tuple[int, ...]
    ) -> list[Hypothesis]:
        """Return the hypotheses that end with candidate `candidates[n]` of step `steps[n]`.

        The first `skip[n]` tokens, of the prefix, are left out. Without scores, the score is the log-probability.
        """
        tokens, gains, attention = self._follow(steps, candidates)
        totals = gains.cumsum(1).gather(1, steps.cpu()[:, None])[:, 0]
        columns = (steps, skip, totals if scores is None else scores, totals)
        hypotheses = []
        for n, (last, first, score, total) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
            path_steps = slice(first, last + 1)
            path = tuple(tokens[n, path_steps].tolist())
            hypotheses.append(
                Hypothesis(
                    tokens=path,
                    score=score,
                    log_probability=total,
                    log_probabilities=tuple(gains[n, path_steps].tolist()),
                    finished=path[-1] in ends,
                    attention={
                        name: x[n, :, path_steps, : self.steps[last].attention[name].shape[-1]]
                        for name, x in attention.items()
                    },
                )
            )
        return hypotheses

    def _follow(self, steps: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return tokens, log-probabilities and attention along each path, a column per step; undefined after it."""
        tokens, gains, rows = [], [], torch.zeros_like(candidates)
        seen: dict[str, list[Tensor]] = {name: [] for name in self.steps[0].attention}
        shortest, longest = (int(n) for n in steps.aminmax())
        for number in reversed(range(longest + 1)):
            step = self.steps[number]
            at = candidates if step.kept is None else step.kept[rows]
            if number >= shortest:  # some paths end at this step or before it
                at = torch.where(steps > number, at, torch.where(steps == number, candidates, 0))
            tokens.append(step.tokens[at])
            gains.append(step.gains[at])
            rows = step.parents[at]
            for name, parts in seen.items():
                parts.append(step.attention[name][rows][:, :, None])
        return (
            torch.stack(tokens[::-1], 1).cpu(),
            torch.stack(gains[::-1], 1).cpu(),
            {name: concat_attention(parts[::-1]) for name, parts in seen.items()},
        )


def concat_attention(parts: list[Tensor]) -> Tensor:
    """Concatenate attention `(rows, heads, n, source)` of successive tokens; shorter sources are padded with 0."""
    widest = max(part.shape[-1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, widest - part.shape[-1])) for part in parts], 2)
