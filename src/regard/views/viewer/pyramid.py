"""The zoom pyramid of a matrix: at level l a cell is 2**l queries by 2**l keys, and a tile at most 256 x 256 cells.

Level 0 is the weights themselves. Tiles are computed on demand: exactly, in steps if that takes long, or as a quick
preview from the stored map or from a sample of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ops.blocks.resample import resample
from .matrix_view import CELLS, MatrixView, StoredMap, runs

TILE = 256  # cells a side
STEP = 256, 4096  # rows and columns of the weights in memory at a time
GPU_STEP = 8192, 8192  # the same on a GPU
MAX_PREVIEW_WEIGHTS = 2**23  # computed for a preview


@dataclass(frozen=True)
class CellValues:
    """The mean and the largest entry of each cell; for a signed matrix, the entry of largest magnitude.

    `queries` is how many queries they were computed from, if not from all.
    """

    mean: Tensor
    max: Tensor | None
    queries: int | None = None


@dataclass(frozen=True)
class CellSpan:
    """The range of one axis that a tile covers, from start to stop, in cells of `size` entries."""

    start: int
    stop: int
    size: int

    @property
    def cells(self) -> int:
        return -(-(self.stop - self.start) // self.size)

    def counts(self) -> Tensor:
        """Return the number of entries of each cell; the last one may have fewer."""
        edges = self.edges()
        return edges.diff()

    def edges(self) -> Tensor:
        """Return where each cell begins, and where the last one ends."""
        return (self.start + torch.arange(self.cells + 1) * self.size).clamp(max=self.stop)


def levels(n_i: int, n_j: int) -> int:
    """Return the number of levels: at the last one the whole matrix is one tile."""
    return max(0, (-(-max(n_i, n_j, 1) // TILE) - 1).bit_length()) + 1


def span(n: int, level: int, tile: int) -> CellSpan:
    """Return the range that tile number `tile` covers of an axis of n entries; empty past its end."""
    size = 2**level
    start = min(tile * TILE * size, n)
    return CellSpan(start, min(start + TILE * size, n), size)


def exact(view: MatrixView, rows: CellSpan, cols: CellSpan) -> Iterator[CellValues | None]:
    """Compute the cells of a tile from its visible entries; yields None after each step and the cells at the end."""
    high, wide = rows.cells, cols.cells
    sums = torch.zeros(high, wide)
    most, least = torch.zeros(high, wide), torch.zeros(high, wide)
    high_step, wide_step = STEP if view.device.type == "cpu" else GPU_STEP
    down, across = _step(high_step, rows.size), max(wide_step, cols.size)
    whole = max(CELLS, cols.size)  # hidden columns are skipped in units of whole cells
    wanted = ("sum", "amax", "amin") if view.signed else ("sum", "amax")
    for top in range(rows.start, rows.stop, down):
        some = slice(top, min(top + down, rows.stop))
        strip = torch.zeros(len(wanted), -(-(some.stop - top) // rows.size), wide, device=view.device)
        for part in runs(
            view.visible_tiles(some, slice(cols.start, cols.stop), whole).any(0), cols.start, cols.stop, whole
        ):
            for left in range(part.start, part.stop, across):
                block = view.block(some, slice(left, min(left + across, part.stop)))
                x = (left - cols.start) // cols.size
                for found, how in zip(strip, wanted, strict=True):
                    cells = _pool(_pool(block, 0, rows.size, how), 1, cols.size, how)
                    found[:, x : x + cells.shape[1]] = cells
                yield None
        # Copy to the host once a strip, not once a block: each copy waits for the device.
        total, tall, *deep = strip.cpu()
        y = (top - rows.start) // rows.size
        at = slice(y, y + len(total))
        sums[at] += total
        most[at] = torch.maximum(most[at], tall)
        if deep:
            least[at] = torch.minimum(least[at], deep[0])
    area = rows.counts()[:, None] * cols.counts()
    yield CellValues(sums / area, torch.where(-least > most, least, most))


def preview(view: MatrixView, rows: CellSpan, cols: CellSpan) -> CellValues:
    """Compute quick means: from the stored map if its cells are no larger, otherwise from a sample of rows."""
    stored = view.stored_map()
    if stored is not None and is_finer(stored, rows, cols):
        return from_map(stored, rows, cols)
    middle = sample_rows(view, rows, cols)
    parts = []
    for left in range(cols.start, cols.stop, max(STEP[1], cols.size)):
        right = min(left + max(STEP[1], cols.size), cols.stop)
        parts.append(_pool(view.block(middle, slice(left, right)), 1, cols.size, "sum").float().cpu())
    means = torch.cat(parts, 1) / cols.counts()
    nearest = torch.arange(rows.cells) * len(middle) // rows.cells
    return CellValues(means[nearest], None, len(middle))


def without_empty_rows(view: MatrixView, rows: CellSpan, cells: CellValues) -> CellValues:
    """Return the cells of a tile with NaN where no row of a cell sees a key."""
    seen = (~view.empty_rows(slice(rows.start, rows.stop))).float()[:, None]
    empty = _pool(seen, 0, rows.size, "amax") == 0
    most = None if cells.max is None else cells.max.masked_fill(empty, torch.nan)
    return replace(cells, mean=cells.mean.masked_fill(empty, torch.nan), max=most)


def sample_rows(view: MatrixView, rows: CellSpan, cols: CellSpan) -> Tensor:
    """Return evenly spread rows: at most one a cell, and within `MAX_PREVIEW_WEIGHTS`."""
    one = view.work(slice(rows.start, rows.start + 1), slice(cols.start, cols.stop))
    count = max(1, min(rows.cells, MAX_PREVIEW_WEIGHTS // max(one, 1)))
    edges = rows.start + (torch.arange(count + 1) * ((rows.stop - rows.start) / count)).long()
    return (edges[:-1] + edges[1:]) // 2


def from_map(stored: StoredMap, rows: CellSpan, cols: CellSpan) -> CellValues:
    """Resample a stored map to the cells of a tile: the mean of each and, if it is known, the largest entry.

    A stored cell that lies in two cells of the tile counts in proportion for the mean, and in both for the largest.
    """
    cells, peaks = stored.map.float().cpu(), None if stored.peaks is None else stored.peaks.float().cpu()
    for dim, (axis, wanted) in enumerate(zip(stored.axes, (rows, cols), strict=True)):
        cells = resample(cells, dim, axis.edges(), wanted.edges())
        if peaks is not None:
            peaks = _largest_between(peaks, dim, axis.edges(), wanted.edges())
    return CellValues(cells, peaks)


def has_whole_cells(stored: StoredMap, rows: CellSpan, cols: CellSpan) -> bool:
    """Whether each cell consists of whole cells of the stored map, so that their means are exact."""
    pairs = zip(stored.axes, (rows, cols), strict=True)
    return all(bool(torch.isin(wanted.edges(), axis.edges()).all()) for axis, wanted in pairs)


def is_finer(stored: StoredMap, rows: CellSpan, cols: CellSpan) -> bool:
    """Whether the cells of the stored map are no larger than those of the tile."""
    pairs = zip(stored.axes, (rows, cols), strict=True)
    return all((axis.size or axis.n / axis.count) <= wanted.size for axis, wanted in pairs)


def _largest_between(cells: Tensor, dim: int, edges: Tensor, wanted: Tensor) -> Tensor:
    """Return the largest of the cells between `edges` that overlap each interval between the `wanted` edges."""
    first = torch.searchsorted(edges, wanted[:-1], right=True) - 1
    stop = torch.searchsorted(edges, wanted[1:])
    pairs = zip(first.tolist(), stop.tolist(), strict=True)
    return torch.stack([cells.narrow(dim, a, b - a).amax(dim) for a, b in pairs], dim)


def _step(step: int, size: int) -> int:
    """Round a number of rows down to whole cells or, if a cell is larger, to a power of 2 that divides it."""
    return step // size * size if size <= step else 1 << (step.bit_length() - 1)


def _pool(x: Tensor, dim: int, size: int, how: str) -> Tensor:
    """Reduce runs of `size` along an axis by `how`: sum, amax or amin; the last run may be shorter."""
    if size == 1:
        return x
    n = x.shape[dim] // size * size
    parts = []
    if n:
        parts.append(getattr(x.narrow(dim, 0, n).unflatten(dim, (-1, size)), how)(dim + 1))
    if n < x.shape[dim]:
        parts.append(getattr(x.narrow(dim, n, x.shape[dim] - n), how)(dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
