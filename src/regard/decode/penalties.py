"""Penalties of Wu et al. 2016 (GNMT), equation 14: what beam search ranks by besides probability."""

from __future__ import annotations

import math
from collections.abc import Callable
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
class CoveragePenalty:
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


Coverage = CoveragePenalty  # the name in `regard.decode`; `regard.nn.Coverage` is the layer of recurrent decoders


class LengthDivisors:
    """length(n) by the number n of tokens, from 0, where it is 1, to `last`.

    >>> divisors = LengthDivisors(float, 4, torch.device("cpu"))
    >>> divisors.at(torch.tensor([1, 3])).tolist(), divisors.most(torch.tensor([1, 3])).tolist()
    ([1.0, 3.0], [4.0, 4.0])

    That of Wu et al. only rises or only falls: it is computed as far as the search has come. Any other function is
    computed whole, for where it is largest is not known before.
    """

    def __init__(self, length: Callable[[int], float] | None, last: int, device: torch.device) -> None:
        self._length, self._last = length, last
        self._values = torch.ones(1, dtype=torch.float64, device=device)
        self._largest: Tensor | None = None
        if length is None or isinstance(length, Gnmt):
            self._end = self._of(last)
        else:
            self.extend(last)
            self._largest = self._values.flip(0).cummax(0).values.flip(0)

    def extend(self, n: int) -> None:
        """Be ready for hypotheses of n tokens."""
        have = len(self._values)
        if have <= min(n, self._last):
            new = [self._of(m) for m in range(have, min(2 * n, self._last) + 1)]
            self._values = torch.cat([self._values, self._values.new_tensor(new)])

    def at(self, n: Tensor) -> Tensor:
        """length(n) of each."""
        return self._values[n]

    def most(self, n: Tensor) -> Tensor:
        """The largest length(m) of any m from n to the last."""
        n = n.clamp(max=self._last)
        return self._values[n].clamp(min=self._end) if self._largest is None else self._largest[n]

    def _of(self, n: int) -> float:
        value = 1.0 if self._length is None else float(self._length(n))
        if not 0 < value < math.inf:
            raise ValueError(f"length must give positive numbers, got length({n}) = {value}")
        return value
