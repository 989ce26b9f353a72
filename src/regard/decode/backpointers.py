"""Trace: everything a search chose, with the way back from each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .hypothesis import Hypothesis


@dataclass
class SearchStep:
    """The candidates of one step; `kept` are those that became the rows of the next."""

    parents: Tensor  # the row each candidate extends
    tokens: Tensor
    gains: Tensor  # log-probability of the token
    attention: Mapping[str, Tensor]  # of each row, not of each candidate
    kept: Tensor | None = None


class Trace:
    """A tree of choices, stored as written: nothing is reordered until a path is asked for."""

    def __init__(self) -> None:
        self.steps: list[SearchStep] = []

    def add(self, step: SearchStep) -> None:
        """Record the candidates of the next step."""
        self.steps.append(step)

    def hypotheses(
        self, *, steps: Tensor, candidates: Tensor, skip: Tensor, scores: Tensor | None, ends: tuple[int, ...]
    ) -> list[Hypothesis]:
        """The paths to these candidates of these steps, each without the `skip` tokens it was given.

        Without scores they score their log-probability.
        """
        tokens, gains, attention = self._follow(steps, candidates)
        totals = gains.cumsum(1).gather(1, steps.cpu()[:, None])[:, 0]
        columns = (steps, skip, totals if scores is None else scores, totals)
        found = []
        for n, (last, first, score, total) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
            chosen = slice(first, last + 1)
            path = tuple(tokens[n, chosen].tolist())
            found.append(
                Hypothesis(
                    tokens=path,
                    score=score,
                    log_probability=total,
                    log_probabilities=tuple(gains[n, chosen].tolist()),
                    finished=path[-1] in ends,
                    attention={
                        name: x[n, :, chosen, : self.steps[last].attention[name].shape[-1]]
                        for name, x in attention.items()
                    },
                )
            )
        return found

    def _follow(self, steps: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Tokens, log-probabilities and attention along each path, a column a step; arbitrary after its last."""
        tokens, gains, rows = [], [], torch.zeros_like(candidates)
        seen: dict[str, list[Tensor]] = {name: [] for name in self.steps[0].attention}
        shortest, longest = (int(n) for n in steps.aminmax())
        for number in reversed(range(longest + 1)):
            step = self.steps[number]
            at = candidates if step.kept is None else step.kept[rows]
            if number >= shortest:  # where some paths end
                at = torch.where(steps > number, at, torch.where(steps == number, candidates, 0))
            tokens.append(step.tokens[at])
            gains.append(step.gains[at])
            rows = step.parents[at]
            for name, found in seen.items():
                found.append(step.attention[name][rows][:, :, None])
        return (
            torch.stack(tokens[::-1], 1).cpu(),
            torch.stack(gains[::-1], 1).cpu(),
            {name: join(found[::-1]) for name, found in seen.items()},
        )


def join(parts: list[Tensor]) -> Tensor:
    """Attention `(rows, heads, n, source)` of successive tokens as one, zeros where a source was still short."""
    widest = max(part.shape[-1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, widest - part.shape[-1])) for part in parts], 2)
