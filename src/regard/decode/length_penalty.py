"""Divisors: what beam search divides the log-probability of a hypothesis by, and how large that may still become."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .penalties import Gnmt


class Divisors:
    """length(n) by the number n of tokens, from 0, where it is 1, to `last`.

    >>> divisors = Divisors(float, 4, torch.device("cpu"))
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
