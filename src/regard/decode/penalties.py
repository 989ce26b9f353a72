"""Length and coverage penalties of beam search, after Wu et al. 2016 (GNMT), equation 14."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_number

MIN_COVERAGE = 1e-9  # a source position without attention costs beta * log(MIN_COVERAGE), not infinity

MAX_ALPHA = 50  # absolute value; with millions of tokens, a larger alpha would overflow


@dataclass(frozen=True)
class Gnmt:
    """((5 + n) / 6) ^ alpha, the divisor of the log-probability of n tokens.

    >>> round(Gnmt(0.6)(7), 3)
    1.516
    """

    alpha: float

    def __post_init__(self) -> None:
        check_number("Gnmt alpha", self.alpha)
        if abs(self.alpha) > MAX_ALPHA:
            raise ValueError(f"Gnmt alpha must be from -{MAX_ALPHA} to {MAX_ALPHA}, got {self.alpha}; 0.6 is usual")

    def __call__(self, n: int) -> float:
        return ((5 + n) / 6) ** self.alpha


@dataclass(frozen=True, eq=False)
class CoveragePenalty:
    """beta * sum_j log(min(attention received by source position j, 1)): at most 0, and 0 when all is covered.

    `name` is the attention of the stepper that counts, averaged over heads. `keep`, `(b, source)`, is True for source
    positions that are not padding; without it every position counts.
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

    def attention_received(self, attention: dict[str, Tensor]) -> Tensor:
        """Return the attention that each source position receives in this step, `(rows, source)`."""
        if self.name not in attention:
            raise ValueError(
                f"Coverage name must be an attention of the stepper, {sorted(attention)}, got {self.name!r}"
            )
        return attention[self.name].double().mean(1)

    def __call__(self, covered: Tensor, sentences: Tensor) -> Tensor:
        """Return the penalty of each row from the attention its source positions received so far."""
        logs = covered.clamp(MIN_COVERAGE, 1.0).log()
        if self.keep is not None:
            logs = logs.masked_fill(~self.keep.to(logs.device)[sentences], 0.0)
        return self.beta * logs.sum(-1)


Coverage = CoveragePenalty  # the name in `regard.decode`; `regard.nn.Coverage` is the layer of recurrent decoders


class LengthDivisors:
    """Table of length(n), the divisor for n tokens, for n up to `last`; length(0) is 1.

    >>> divisors = LengthDivisors(float, 4, torch.device("cpu"))
    >>> divisors.at(torch.tensor([1, 3])).tolist(), divisors.most(torch.tensor([1, 3])).tolist()
    ([1.0, 3.0], [4.0, 4.0])

    `Gnmt` is monotonic in n, so it is computed only as far as the search has come. Any other function is computed up to
    `last` at once, because its maximum may be anywhere.
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
        """Compute the table up to n tokens at least."""
        have = len(self._values)
        if have <= min(n, self._last):
            new = [self._of(m) for m in range(have, min(2 * n, self._last) + 1)]
            self._values = torch.cat([self._values, self._values.new_tensor(new)])

    def at(self, n: Tensor) -> Tensor:
        """Return length(n) of each."""
        return self._values[n]

    def most(self, n: Tensor) -> Tensor:
        """Return the largest length(m) for m from n to `last`."""
        n = n.clamp(max=self._last)
        return self._values[n].clamp(min=self._end) if self._largest is None else self._largest[n]

    def _of(self, n: int) -> float:
        value = 1.0 if self._length is None else float(self._length(n))
        if not 0 < value < math.inf:
            raise ValueError(f"length must give positive numbers, got length({n}) = {value}")
        return value
