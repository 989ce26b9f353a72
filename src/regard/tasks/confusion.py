"""Confusion: which classes were taken for which, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .metrics import Measured

MOST = 20  # classes a table is printed of


class Confusion(NamedTuple):
    """Counts by class, as it is (down) and as it was found (across).

    >>> print(Confusion.of([0, 0, 1, 1], [0, 1, 1, 1], ("cat", "dog")))
                 cat dog
        cat        1   1
        dog        0   2
    """

    counts: Tensor
    classes: tuple[str, ...]

    @classmethod
    def of(cls, right: Sequence[int], found: Sequence[int], classes: tuple[str, ...]) -> Confusion:
        """The table of what examples are, and what they were taken for."""
        n = len(classes)
        pairs = torch.tensor([a * n + b for a, b in zip(right, found, strict=True)], dtype=torch.long)
        return cls(pairs.bincount(minlength=n * n).view(n, n), tuple(classes))

    @property
    def accuracy(self) -> Measured:
        """The percentage that was found to be what it is."""
        total = int(self.counts.sum())
        return Measured(100 * int(self.counts.diagonal().sum()) / max(total, 1), f"% of {total:,} examples")

    @property
    def f1(self) -> Measured:
        """2 p r / (p + r) of precision and recall, in percent, the mean over the classes that occur."""
        hits = self.counts.diagonal().double()
        there, found = self.counts.sum(1), self.counts.sum(0)
        occurs = there + found > 0
        each = 2 * hits[occurs] / (there + found)[occurs]
        return Measured(100 * float(each.mean()) if len(each) else 0.0, f"% macro, {len(each)} classes")

    def worst(self, most: int = MOST) -> list[tuple[str, str, int]]:
        """What was most often taken for what: class, other class, how often."""
        wrong = self.counts.clone()
        wrong.fill_diagonal_(0)
        values, places = wrong.flatten().sort(descending=True, stable=True)
        n = len(self.classes)
        pairs = zip(values.tolist()[:most], places.tolist(), strict=False)
        return [(self.classes[place // n], self.classes[place % n], count) for count, place in pairs if count]

    def __str__(self) -> str:
        if len(self.classes) > MOST:
            found = [f"{count:>8} x {a} taken for {b}" for a, b, count in self.worst()]
            return "\n".join(found) or "    nothing was taken for anything else"
        names = [name[:12] for name in self.classes]
        wide = max(3, *(len(str(count)) for count in self.counts.flatten().tolist()), *map(len, names))
        left = max(8, *map(len, names))
        lines = [" " * (left + 5) + " ".join(f"{name:>{wide}}" for name in names)]
        for name, row in zip(names, self.counts.tolist(), strict=True):
            lines.append(f"    {name:{left}} " + " ".join(f"{count:>{wide}}" for count in row))
        return "\n".join(lines)
