"""Generated examples: any number, each from its own seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Generated(Generic[T_co]):
    """Calls `make(rng)` for each number below `size`; example n is the same in every epoch and process.

    >>> from regard.data import Reverse
    >>> toys = Generated(Reverse(), size=1000, seed=0)
    >>> len(toys), toys[7] == toys[7], toys[7] == toys[8]
    (1000, True, False)

    Nothing is stored, so a size of a billion costs nothing.
    """

    def __init__(self, make: Callable[[random.Random], T_co], *, size: int, seed: int = 0) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a whole number of examples, at least 1, got {size!r}")
        self.make, self.size, self.seed = make, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> T_co:
        if not -self.size <= number < self.size:
            raise IndexError(f"there is no example {number}: there are {self.size}, counted from 0")
        return self.make(random.Random(f"{self.seed} {number % self.size}"))

    def __iter__(self) -> Iterator[T_co]:
        return (self[number] for number in range(self.size))

    def __repr__(self) -> str:
        return f"Generated({self.make}, size={self.size}, seed={self.seed})"
