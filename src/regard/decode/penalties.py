"""Penalties of Wu et al. 2016 (GNMT), equation 14: what beam search ranks by besides probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_number

FLOOR = 1e-9  # a source position never attended to costs beta * log(FLOOR), not everything

ALPHA = 50  # at most, either way: up to millions of tokens, the penalty of more would overflow


@dataclass(frozen=True)
class Gnmt:
    """((5 + n) / 6) ^ alpha, what the log-probability of n tokens is divided by.

    >>> round(Gnmt(0.6)(7), 3)
    1.516
    """

    alpha: float

    def __post_init__(self) -> None:
        check_number("Gnmt alpha", self.alpha)
        if abs(self.alpha) > ALPHA:
            raise ValueError(f"Gnmt alpha must be from -{ALPHA} to {ALPHA}, got {self.alpha}; 0.6 is usual")

    def __call__(self, n: int) -> float:
        return ((5 + n) / 6) ** self.alpha


@dataclass(frozen=True, eq=False)
class Coverage:
    """beta * sum_j log(min(attention received by source position j, 1)): at most 0, and 0 when all is covered.

    `name` says which attention of the stepper counts, its heads averaged. `keep`, `(b, source)`, is True where the
    source is not padding; without it every position counts.
    """

    beta: float
    name: str
    keep: Tensor | None = None

    def __post_init__(self) -> None:
        check_number("Coverage beta", self.beta)
        if self.beta < 0:
            raise ValueError(f"Coverage beta must be 0 or more, got {self.beta}")
        if self.keep is not None and (self.keep.dtype != torch.bool or self.keep.ndim != 2):
            raise ValueError(
                "Coverage keep must be bool of dims b source, True where the source is not padding, got "
                f"{self.keep.dtype} of shape {tuple(self.keep.shape)}"
            )

    def received(self, attention: dict[str, Tensor]) -> Tensor:
        """What each source position receives in this step, `(rows, source)`."""
        if self.name not in attention:
            raise ValueError(
                f"Coverage name must be an attention of the stepper, {sorted(attention)}, got {self.name!r}"
            )
        return attention[self.name].double().mean(1)

    def __call__(self, covered: Tensor, sentences: Tensor) -> Tensor:
        """The penalty of each row, given what its source positions have received so far."""
        logs = covered.clamp(FLOOR, 1.0).log()
        if self.keep is not None:
            logs = logs.masked_fill(~self.keep.to(logs.device)[sentences], 0.0)
        return self.beta * logs.sum(-1)
