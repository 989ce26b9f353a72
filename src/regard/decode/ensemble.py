"""Ensemble: several models that decode as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from .stepper import Stepper, advance, attention_of, read, replay_objection, replay_steps, rows_of


class Ensemble:
    """A stepper from several steppers over one vocabulary: the mean of their probabilities, or of their logits.

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

    The mean of logits is the geometric mean of the probabilities, renormalized: a token that is impossible for one
    member is impossible. Names of attention get the number of the member as a prefix: `0.name`.
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
        """Return the states of all members from the same source."""
        return EnsembleState(tuple(member.start(source) for member in self.members))

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """Make a step of every member; return the mean of their predictions, and their states."""
        steps = [advance(member, tokens, each) for member, each in zip(self.members, state.states, strict=True)]
        logits = [x for x, _ in steps]
        if len({x.shape for x in logits}) > 1:
            raise ValueError(
                f"members must share one vocabulary, got logits of shapes {[tuple(x.shape) for x in logits]}"
            )
        if self.mean == "logits":
            mean = torch.stack(logits).mean(0)
        else:
            each = torch.stack(logits)
            impossible = each.amax(-1, keepdim=True) == -math.inf  # a member without a possible token has no softmax
            mean = each.log_softmax(-1).masked_fill(impossible, -math.inf).logsumexp(0) - math.log(len(logits))
        return mean, EnsembleState(tuple(each for _, each in steps))

    def read(self, tokens: Tensor, state: EnsembleState) -> EnsembleState:
        """Return the states of all members after the tokens."""
        pairs = zip(self.members, state.states, strict=True)
        return EnsembleState(tuple(read(member, tokens, each) for member, each in pairs))

    def replay_steps(self, state: EnsembleState, steps: int) -> EnsembleState:
        """Return a state whose next steps are CUDA graphs in the members that can."""
        pairs = zip(self.members, state.states, strict=True)
        return EnsembleState(tuple(replay_steps(member, each, steps) for member, each in pairs))

    def replay_objection(self) -> str | None:
        """Return why the steps of some member are no CUDA graphs, None if all are."""
        return next((why for member in self.members if (why := replay_objection(member)) is not None), None)


@dataclass(frozen=True)
class EnsembleState:
    """The state of each member."""

    states: tuple[Any, ...]

    @property
    def rows(self) -> int | None:
        """Number of rows, from the first member that knows it."""
        return next((rows for rows in map(rows_of, self.states) if rows is not None), None)

    @property
    def attention(self) -> dict[str, Tensor]:
        """Attention of every member, as `0.name`, `1.name` and so on."""
        return {
            f"{number}.{name}": x for number, state in enumerate(self.states) for name, x in attention_of(state).items()
        }

    def select(self, rows: Tensor) -> Self:
        """Return these rows of every member."""
        return type(self)(tuple(state.select(rows) for state in self.states))
