"""Toy tasks that separate mechanisms: copy, reverse, sort, recall, arithmetic. Spaces separate symbols."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from .pairs import Pair

LETTERS = list(string.ascii_lowercase)


@dataclass(frozen=True, kw_only=True)
class _Letters:
    """Words of `shortest` to `longest` letters; train on short ones and test on long ones to see what extrapolates."""

    shortest: int = 1
    longest: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest and longest must be at least 1, in that order, got {self.shortest} and {self.longest}"
            )

    def _draw(self, rng: random.Random) -> list[str]:
        return rng.choices(LETTERS, k=rng.randint(self.shortest, self.longest))


class Copy(_Letters):
    """Copy the letters.

    >>> Copy(longest=4)(random.Random(0))
    Pair(source='t k g n', target='t k g n')
    """

    def __call__(self, rng: random.Random) -> Pair:
        letters = self._draw(rng)
        return Pair(" ".join(letters), " ".join(letters))


class Reverse(_Letters):
    """Reverse the letters.

    >>> Reverse(longest=4)(random.Random(0))
    Pair(source='t k g n', target='n g k t')
    """

    def __call__(self, rng: random.Random) -> Pair:
        letters = self._draw(rng)
        return Pair(" ".join(letters), " ".join(reversed(letters)))


class Sort(_Letters):
    """Sort the letters.

    >>> Sort(longest=4)(random.Random(0))
    Pair(source='t k g n', target='g k n t')
    """

    def __call__(self, rng: random.Random) -> Pair:
        letters = self._draw(rng)
        return Pair(" ".join(letters), " ".join(sorted(letters)))


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Keys with values, then one of the keys: write its value (associative recall; Graves et al. 2014, section 4.3).

    >>> Recall(longest=3)(random.Random(0))
    Pair(source='y 0 n 4 ? n', target='4')
    """

    shortest: int = 1
    longest: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= len(LETTERS):
            raise ValueError(
                f"shortest and longest must lie in 1 to {len(LETTERS)}, in that order, "
                f"got {self.shortest} and {self.longest}"
            )

    def __call__(self, rng: random.Random) -> Pair:
        keys = rng.sample(LETTERS, rng.randint(self.shortest, self.longest))
        values = {key: rng.choice(string.digits) for key in keys}
        asked = rng.choice(keys)
        listed = " ".join(f"{key} {value}" for key, value in values.items())
        return Pair(f"{listed} ? {asked}", values[asked])


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Sums, differences and products of numbers of 1 to `digits` digits, digit by digit.

    >>> Arithmetic(digits=3)(random.Random(0))
    Pair(source='9 7 - 5', target='9 2')
    """

    digits: int = 3
    operations: str = "+-*"

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"digits must be at least 1, got {self.digits}")
        if not self.operations or set(self.operations) - set("+-*"):
            raise ValueError(f"operations must be one or more of '+', '-' and '*', got {self.operations!r}")

    def __call__(self, rng: random.Random) -> Pair:
        # Draw the number of digits first, so that short numbers are as common as long ones.
        a, b = (rng.randrange(10 ** rng.randint(1, self.digits)) for _ in range(2))
        sign = rng.choice(self.operations)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        return Pair(" ".join(f"{a}{sign}{b}"), " ".join(str(result)))
