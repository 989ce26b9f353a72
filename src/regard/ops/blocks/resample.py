"""Means of neighbouring cells of a map on a coarser or shifted grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pool_bins import Axis


def shrink(cells: Tensor, max_cells: int, axes: Sequence[Axis] = ()) -> Tensor:
    """Average neighbouring cells along the last two dims until each has at most `max_cells`.

    `axes` are the bins of the cells; without them all cells have the same size.
    """
    if not cells.numel():
        return cells
    for dim, axis in zip((-2, -1), axes or [Axis.even(n, n) for n in cells.shape[-2:]], strict=True):
        if axis.count > max_cells:
            new_edges = torch.arange(max_cells + 1) * (axis.n / max_cells)
            cells = resample(cells, dim, axis.edges().to(cells.device), new_edges.to(cells.device))
    return cells


def resample(cells: Tensor, dim: int, edges: Tensor, new_edges: Tensor) -> Tensor:
    """Turn means of the intervals between `edges` into means of the intervals between `new_edges`.

    A cell that a new edge cuts counts in proportion to its parts. A new cell that overlaps a NaN is NaN.

    >>> resample(torch.tensor([1.0, 2.0, 6.0]), 0, torch.arange(4), torch.tensor([0.0, 1.5, 3.0]))
    tensor([1.3333, 4.6667])
    """
    # Zero times NaN is NaN: without this, the product below would carry a NaN to every new cell.
    if bool((missing := cells.isnan()).any()):
        holes = resample(missing.double(), dim, edges, new_edges) > 0
        return resample(cells.nan_to_num(nan=0.0), dim, edges, new_edges).masked_fill(holes, torch.nan)
    edges, new_edges = edges.double(), new_edges.double()
    last = torch.minimum(edges[1:, None], new_edges[1:])
    overlap = (last - torch.maximum(edges[:-1, None], new_edges[:-1])).clamp(min=0)
    means = cells.movedim(dim, -1).double() @ (overlap / new_edges.diff())
    return means.to(cells.dtype).movedim(-1, dim)
