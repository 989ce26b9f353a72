"""Ensemble: several models that decode as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from .stepper import Stepper, advance, attention_of, read, rows_of


class Ensemble:
    """Several steppers over one vocabulary as a single one: the mean of their probabilities, or of their logits.

    >>> import torch
    >>> from regard.decode import greedy
    >>> class Always:  # the same logits, whatever it reads
    ...     def __init__(self, *logits): self.logits = torch.tensor(logits)
    ...     def start(self, source): return self
    ...     def step(self, tokens, state): return self.logits.expand(*tokens.shape, -1), self
    ...     def select(self, rows): return self
    >>> both = Ensemble([Always(3.0, 0.0, 2.5), Always(0.0, 3.0, 2.5)])
    >>> greedy(both, None, [[0]], end=None, max_length=2)[0].tokens
    (2, 2)

    The mean of logits is the geometric mean of the probabilities, renormalized: a token any member finds impossible
    stays so. Attention keeps its names, with the number of the member and a dot before them.
    """

    def __init__(
        self, members: Sequence[Stepper], *, mean: Literal["probabilities", "logits"] = "probabilities"
    ) -> None:
        if not members:
            raise ValueError("members must hold at least one stepper, got none")
        if mean not in ("probabilities", "logits"):
            raise ValueError(f"mean must be 'probabilities' or 'logits', got {mean!r}")
        self.members = tuple(members)
        self.mean = mean

    def start(self, source: Any) -> EnsembleState:
        """The states of all members, each from the same source."""
        return EnsembleState(tuple(member.start(source) for member in self.members))

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """One step of every member, and the mean of what they say."""
        steps = [advance(member, tokens, each) for member, each in zip(self.members, state.states, strict=True)]
        logits = [one for one, _ in steps]
        if len({one.shape for one in logits}) > 1:
            raise ValueError(
                f"members must share one vocabulary, got logits of shapes {[tuple(one.shape) for one in logits]}"
            )
        if self.mean == "logits":
            mean = torch.stack(logits).mean(0)
        else:
            each = torch.stack(logits)
            impossible = each.amax(-1, keepdim=True) == -math.inf  # for a member at a dead end, which has no softmax
            mean = each.log_softmax(-1).masked_fill(impossible, -math.inf).logsumexp(0) - math.log(len(logits))
        return mean, EnsembleState(tuple(each for _, each in steps))

    def read(self, tokens: Tensor, state: EnsembleState) -> EnsembleState:
        """What every member makes of given tokens."""
        pairs = zip(self.members, state.states, strict=True)
        return EnsembleState(tuple(read(member, tokens, each) for member, each in pairs))


@dataclass(frozen=True)
class EnsembleState:
    """The state of each member."""

    states: tuple[Any, ...]

    @property
    def rows(self) -> int | None:
        """How many rows the members have, as the first of them that knows says."""
        return next((rows for rows in map(rows_of, self.states) if rows is not None), None)

    @property
    def attention(self) -> dict[str, Tensor]:
        """The attention of every member, as `0.name`, `1.name` and so on."""
        return {
            f"{number}.{name}": x for number, state in enumerate(self.states) for name, x in attention_of(state).items()
        }

    def select(self, rows: Tensor) -> Self:
        """The same rows of every member."""
        return type(self)(tuple(state.select(rows) for state in self.states))
