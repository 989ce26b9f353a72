"""Bins and groups: the cell of a map that a query or a key belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

How = Literal["mean", "sum", "max"]


@dataclass(frozen=True)
class Axis:
    """n neighbours in `count` bins: `size` per bin and the remainder in the last; evenly spread if size is None.

    >>> Axis.even(10, 4).edges().tolist(), Axis.cells(10, 4).edges().tolist()
    ([0, 3, 5, 8, 10], [0, 4, 8, 10])
    """

    n: int
    count: int
    size: int | None

    @staticmethod
    def even(n: int, count: int) -> Axis:
        """Bins as even as can be: neighbour r is in bin r * count // n."""
        return Axis(n, count, None if n % count else n // count)

    @staticmethod
    def cells(n: int, most: int) -> Axis:
        """At most `most` bins; each holds 2^n neighbours, with the smallest n for which they suffice."""
        size = 1 << (-(-n // most) - 1).bit_length() if n else 1
        return Axis(n, max(1, -(-n // size)), size)

    @property
    def is_uniform(self) -> bool:
        """True if all bins hold equally many neighbours."""
        return self.size is not None and self.size * self.count == self.n

    @property
    def last(self) -> int:
        """The number of neighbours in the last bin."""
        before = self.count - 1
        return self.n - (-(-before * self.n // self.count) if self.size is None else before * self.size)

    def edges(self) -> Tensor:
        """The first neighbour of each bin, and the end of the last bin."""
        numbers = torch.arange(self.count + 1)
        return -(-numbers * self.n // self.count) if self.size is None else (numbers * self.size).clamp(max=self.n)

    def ids(self, device: torch.device) -> Tensor:
        """The bin of each neighbour: `1 n`. Cached: do not write to it."""
        return _ids(self, device)


@lru_cache(maxsize=16)
def _ids(axis: Axis, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        numbers = torch.arange(axis.n, device=device)
        bins = numbers * axis.count // max(axis.n, 1) if axis.size is None else numbers // max(axis.size, 1)
        return bins[None]


@lru_cache(maxsize=16)
def area(rows: Axis, cols: Axis, device: torch.device) -> Tensor | int:
    """The number of entries of each pair of bins, at least 1: an int, or a cached tensor `rows cols`, read only."""
    if rows.is_uniform and cols.is_uniform:
        return max(1, (rows.size or 0) * (cols.size or 0))
    with torch.inference_mode(False):
        high, wide = (axis.edges().diff().to(device) for axis in (rows, cols))
        return (high[:, None] * wide).clamp(min=1)


@dataclass(frozen=True)
class Mesh:
    """Bins of queries by bins of keys, and what to compute for each pair: the mean, the sum or the maximum."""

    rows: Axis
    cols: Axis
    device: torch.device
    how: How = "mean"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of row bins and of column bins."""
        return self.rows.count, self.cols.count

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """The bin of each query, and of each key: `1 i`, `1 j`."""
        return self.rows.ids(self.device), self.cols.ids(self.device)

    @property
    def area(self) -> Tensor | int:
        """The number of entries of each pair of bins."""
        return area(self.rows, self.cols, self.device)


def check_groups(name: str, ids: Tensor, b: int, n: int, device: torch.device) -> Tensor:
    """Check the group ids of a caller and return them as `1 n` or `b n`."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be a tensor of whole numbers, got {kind}")
    if tuple(ids.shape) not in ((n,), (b, n), (1, n)):
        raise ValueError(f"{name} must have dims ({n},) or ({b}, {n}), got shape {tuple(ids.shape)}")
    if ids.numel() and int(ids.min()) < 0:
        raise ValueError(f"{name} must be 0 or more, got {int(ids.min())}")
    return (ids if ids.ndim == 2 else ids[None]).to(device).long()
