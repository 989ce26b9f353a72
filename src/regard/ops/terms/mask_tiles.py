"""Tiles of the matrix: the smallest and largest position or tensor entry in each, and which are empty or full.

`Grid` cuts a block of the matrix into tiles. `Mask.tiles(grid)` compares the `Span`s of the grid and returns `Tiles`,
so that whole tiles are skipped or computed unmasked without evaluating the mask at single entries.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .coordinates import Block, take_entries


class Tiles(NamedTuple):
    """For each tile: `some` is False only if no entry is visible; `full` is True only if every entry is.

    Both are bool tensors broadcastable over b h tile-rows tile-cols. They bound the mask over the block:

        for r, c in product(range(tile_rows), range(tile_cols)):
            tile = mask.over(block)[..., r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
            assert not tile.any() or some[..., r, c]      # a tile without `some` is empty
            assert tile.all() or not full[..., r, c]      # a tile with `full` needs no mask
    """

    some: Tensor
    full: Tensor


class Span(NamedTuple):
    """The smallest and largest value within each tile."""

    low: Tensor
    high: Tensor

    def between(self, low: float | Tensor, high: float | Tensor) -> Tiles:
        """Compare with a range: `some` if a value may lie in low..high, `full` if all values do."""
        # Written so that NaN counts as "may be visible": a tile that cannot be compared is evaluated entry by entry.
        some = ~((self.high < low) | (self.low > high))
        return Tiles(some, (self.low >= low) & (self.high <= high))


class Grid:
    """A block of the matrix cut into tiles of `rows` x `cols`.

    *Basics.* `grid.i`, `grid.j` and `grid.distance` are the spans of the query positions, the key positions and i - j;
    `grid.span(tensor, axes)` is the span of a tensor. Spans broadcast over b h tile-rows tile-cols.

    *Details.* Tile (r, c) holds entries [r * rows : (r + 1) * rows] x [c * cols : (c + 1) * cols] of the block; tiles
    at the ends may be smaller. A dim of size 1 is not cut, so it broadcasts over all tiles:

        low = [x[r * rows : (r + 1) * rows].min() for r in range(ceil(n_i / rows))]      # x one entry a row
    """

    def __init__(self, block: Block, rows: int, cols: int) -> None:
        self.block = block
        self.rows = rows
        self.cols = cols
        self.device = block.device

    @cached_property
    def i(self) -> Span:
        """Query positions."""
        row, offset = self.row, self.block.offsets
        return Span(row.low + offset, row.high + offset)

    @cached_property
    def j(self) -> Span:
        """Key positions."""
        cols = self.block.cols
        return self._range(cols, self.cols) if isinstance(cols, slice) else self._span(cols[None, None, None])

    @cached_property
    def row(self) -> Span:
        """Query rows."""
        rows = self.block.selector("i")
        if isinstance(rows, Tensor):
            return self._span(rows[None, None, :, None])
        low, high = self._range(rows, self.rows)
        return Span(low.mT, high.mT)

    @cached_property
    def distance(self) -> Span:
        """i - j."""
        return Span(self.i.low - self.j.high, self.i.high - self.j.low)

    def span(self, tensor: Tensor, axes: str) -> Span:
        """The span of a tensor with dims `axes`."""
        return self._span(self.block.slice_of(tensor, axes))

    def count(self, layout: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return for each tile how many cells of a layout that it touches are True, and how many it touches.

        A cell of the layout covers `sizes` entries of the matrix, rows by columns.
        """
        row, col = self.row, self.j
        layout = layout[(None,) * (4 - layout.ndim)]
        layout = take_entries(
            layout, tuple(slice(None) if layout.shape[n] == 1 else self.block.selector("bh"[n]) for n in (0, 1))
        )
        total = F.pad(layout.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))  # summed-area table
        rows, cols = sizes
        r0, r1 = row.low // rows, row.high // rows + 1
        c0, c1 = col.low // cols, col.high // cols + 1
        if layout.shape[-2] == 1:
            r0, r1 = r0 * 0, r1 * 0 + 1
        if layout.shape[-1] == 1:
            c0, c1 = c0 * 0, c1 * 0 + 1
        r0, r1, c0, c1 = r0[0, 0], r1[0, 0], c0[0, 0], c1[0, 0]
        count = total[..., r1, c1] - total[..., r0, c1] - total[..., r1, c0] + total[..., r0, c0]
        return count, (r1 - r0) * (c1 - c0)

    def _range(self, positions: slice, size: int) -> Span:
        """The span of consecutive positions, which is known without looking at each, along the last dim."""
        low = torch.arange(positions.start, positions.stop, size, device=self.device)[None, None, None]
        return Span(low, (low + (size - 1)).clamp_(max=positions.stop - 1))

    def _span(self, x: Tensor) -> Span:
        low = high = x
        for dim, size in ((2, self.rows), (3, self.cols)):
            if x.shape[dim] > 1:
                low, high = _split_dim(low, dim, size).amin(dim + 1), _split_dim(high, dim, size).amax(dim + 1)
        return Span(low, high)


def _split_dim(x: Tensor, dim: int, size: int) -> Tensor:
    """Split `dim` into tiles of `size`; the last tile is padded with copies of the last entry."""
    short = -x.shape[dim] % size
    if short:
        last = x.narrow(dim, x.shape[dim] - 1, 1)
        x = torch.cat([x, last.expand([short if d == dim else n for d, n in enumerate(x.shape)])], dim)
    return x.unflatten(dim, (-1, size))
