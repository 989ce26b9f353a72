"""The matrix cut into tiles, and the least and greatest value of things within each tile."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .coordinates import Block, pick
from .masks.mask_algebra import Span


class Grid:
    """A block of the matrix cut into tiles of `rows` x `cols`; spans broadcast over b h row-tiles col-tiles."""

    def __init__(self, block: Block, rows: int, cols: int) -> None:
        self.block = block
        self.rows = rows
        self.cols = cols
        self.device = block.device

    @cached_property
    def i(self) -> Span:
        """Query positions."""
        return self._tiled(self.block.i[None, None])

    @cached_property
    def j(self) -> Span:
        """Key positions."""
        return self._tiled(self.block.j[None, None, None])

    @cached_property
    def distance(self) -> Span:
        """i - j."""
        return Span(self.i.low - self.j.high, self.i.high - self.j.low)

    def span(self, tensor: Tensor, axes: str) -> Span:
        """The span of a tensor laid out along `axes`."""
        return self._tiled(self.block.cut(tensor, axes))

    def count(self, layout: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """How many cells of a block layout each tile touches are set, and how many it touches."""
        row, col = self._tiled(self.block.row[None, None]), self.j
        layout = layout[(None,) * (4 - layout.ndim)]
        layout = pick(
            layout, tuple(slice(None) if layout.shape[n] == 1 else self.block.selector("bh"[n]) for n in (0, 1))
        )
        total = F.pad(layout.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        r0, r1 = row.low // size, row.high // size + 1
        c0, c1 = col.low // size, col.high // size + 1
        if layout.shape[-2] == 1:
            r0, r1 = r0 * 0, r1 * 0 + 1
        if layout.shape[-1] == 1:
            c0, c1 = c0 * 0, c1 * 0 + 1
        r0, r1, c0, c1 = r0[0, 0], r1[0, 0], c0[0, 0], c1[0, 0]
        count = total[..., r1, c1] - total[..., r0, c1] - total[..., r1, c0] + total[..., r0, c0]
        return count, (r1 - r0) * (c1 - c0)

    def _tiled(self, x: Tensor) -> Span:
        low = high = x
        for dim, size in ((2, self.rows), (3, self.cols)):
            if x.shape[dim] > 1:
                low, high = _reduce(low, dim, size).amin(dim + 1), _reduce(high, dim, size).amax(dim + 1)
        return Span(low, high)


def _reduce(x: Tensor, dim: int, size: int) -> Tensor:
    """Split `dim` into tiles; the last one is filled up with copies of the last entry."""
    short = -x.shape[dim] % size
    if short:
        last = x.narrow(dim, x.shape[dim] - 1, 1)
        x = torch.cat([x, last.expand([short if d == dim else n for d, n in enumerate(x.shape)])], dim)
    return x.unflatten(dim, (-1, size))
