"""The pyramid of a sheet: at level l a cell is 2**l queries by 2**l keys, and a tile at most 256 x 256 cells.

Level 0 is the weights themselves. Tiles are made when somebody looks: exactly, step by step where that takes long, and
at once but roughly from the stored map or from some of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.blocks.resample import resample
from .matrix_view import CELLS, Sheet, Stored, runs

TILE = 256  # cells a side
STEP = 256, 4096  # rows and columns of the weights held at once
ON_GPU = 8192, 8192  # as many where a GPU finds them
SAMPLED = 2**23  # weights a preview may take


@dataclass(frozen=True)
class Cells:
    """The mean and the largest entry of each cell; the largest in size, with its sign, where entries have signs."""

    mean: Tensor
    max: Tensor | None


@dataclass(frozen=True)
class Span:
    """The entries of one axis that a tile covers, from start to stop, in cells of `size`."""

    start: int
    stop: int
    size: int

    @property
    def cells(self) -> int:
        return -(-(self.stop - self.start) // self.size)

    def counts(self) -> Tensor:
        """How many entries each cell has: the last one may have fewer."""
        edges = self.edges()
        return edges.diff()

    def edges(self) -> Tensor:
        """Where cells begin, and where the last one ends."""
        return (self.start + torch.arange(self.cells + 1) * self.size).clamp(max=self.stop)


def levels(n_i: int, n_j: int) -> int:
    """How many levels there are: at the last one everything is in one tile."""
    return max(0, (-(-max(n_i, n_j, 1) // TILE) - 1).bit_length()) + 1


def span(n: int, level: int, tile: int) -> Span:
    """What tile number `tile` covers of an axis of n; empty past its end."""
    size = 2**level
    start = min(tile * TILE * size, n)
    return Span(start, min(start + TILE * size, n), size)


def exact(sheet: Sheet, rows: Span, cols: Span) -> Iterator[Cells | None]:
    """The cells of a tile from every entry that may be seen; yields None after each step and the cells at the end."""
    high, wide = rows.cells, cols.cells
    sums = torch.zeros(high, wide)
    most, least = torch.zeros(high, wide), torch.zeros(high, wide)
    high_step, wide_step = STEP if sheet.device.type == "cpu" else ON_GPU
    down, across = _step(high_step, rows.size), max(wide_step, cols.size)
    whole = max(CELLS, cols.size)  # columns that are left out together: whole cells
    wanted = ("sum", "amax", "amin") if sheet.signed else ("sum", "amax")
    for top in range(rows.start, rows.stop, down):
        some = slice(top, min(top + down, rows.stop))
        strip = torch.zeros(len(wanted), -(-(some.stop - top) // rows.size), wide, device=sheet.device)
        for part in runs(sheet.seen(some, slice(cols.start, cols.stop), whole).any(0), cols.start, cols.stop, whole):
            for left in range(part.start, part.stop, across):
                block = sheet.block(some, slice(left, min(left + across, part.stop)))
                x = (left - cols.start) // cols.size
                for found, how in zip(strip, wanted, strict=True):
                    cells = _pooled(_pooled(block, 0, rows.size, how), 1, cols.size, how)
                    found[:, x : x + cells.shape[1]] = cells
                yield None
        # A strip at a time, so that a device is waited for once and not at every block.
        total, tall, *deep = strip.cpu()
        y = (top - rows.start) // rows.size
        at = slice(y, y + len(total))
        sums[at] += total
        most[at] = torch.maximum(most[at], tall)
        if deep:
            least[at] = torch.minimum(least[at], deep[0])
    area = rows.counts()[:, None] * cols.counts()
    yield Cells(sums / area, torch.where(-least > most, least, most))


def preview(sheet: Sheet, rows: Span, cols: Span) -> Cells:
    """Means at once: from the stored map where its cells are no larger, else from as many rows as there is time for."""
    stored = sheet.stored()
    if stored is not None and finer(stored, rows, cols):
        return from_map(stored, rows, cols)
    middle = sampled(sheet, rows, cols)
    parts = []
    for left in range(cols.start, cols.stop, max(STEP[1], cols.size)):
        right = min(left + max(STEP[1], cols.size), cols.stop)
        parts.append(_pooled(sheet.block(middle, slice(left, right)), 1, cols.size, "sum").float().cpu())
    means = torch.cat(parts, 1) / cols.counts()
    nearest = torch.arange(rows.cells) * len(middle) // rows.cells
    return Cells(means[nearest], None)


def sampled(sheet: Sheet, rows: Span, cols: Span) -> Tensor:
    """Rows that stand for the others, evenly spread: at most one a cell, and as many as there is time for."""
    one = sheet.work(slice(rows.start, rows.start + 1), slice(cols.start, cols.stop))
    count = max(1, min(rows.cells, SAMPLED // max(one, 1)))
    edges = rows.start + (torch.arange(count + 1) * ((rows.stop - rows.start) / count)).long()
    return (edges[:-1] + edges[1:]) // 2


def from_map(stored: Stored, rows: Span, cols: Span) -> Cells:
    """Means of the parts of a stored map that lie under each cell."""
    cells = stored.map.float().cpu()
    for dim, (axis, wanted) in enumerate(zip(stored.axes, (rows, cols), strict=True)):
        cells = resample(cells, dim, axis.edges(), wanted.edges())
    return Cells(cells, None)


def aligned(stored: Stored, rows: Span, cols: Span) -> bool:
    """Are the cells made of whole cells of a stored map, so that its means are theirs?"""
    pairs = zip(stored.axes, (rows, cols), strict=True)
    return all(bool(torch.isin(wanted.edges(), axis.edges()).all()) for axis, wanted in pairs)


def finer(stored: Stored, rows: Span, cols: Span) -> bool:
    """Are the cells of a stored map no larger?"""
    pairs = zip(stored.axes, (rows, cols), strict=True)
    return all((axis.size or axis.n / axis.count) <= wanted.size for axis, wanted in pairs)


def _step(step: int, size: int) -> int:
    """A number of rows that is made of whole cells, or that makes whole cells."""
    return step // size * size if size <= step else 1 << (step.bit_length() - 1)


def _pooled(x: Tensor, dim: int, size: int, how: str) -> Tensor:
    """Sums, or the largest or smallest, of runs of `size` along an axis; the last run may be shorter."""
    if size == 1:
        return x
    n = x.shape[dim] // size * size
    parts = []
    if n:
        parts.append(getattr(x.narrow(dim, 0, n).unflatten(dim, (-1, size)), how)(dim + 1))
    if n < x.shape[dim]:
        parts.append(getattr(x.narrow(dim, n, x.shape[dim] - n), how)(dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
