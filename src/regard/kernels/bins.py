"""Bins of a map: which row and which column of it each query and each key adds to, and how queries are dealt out.

The rows of a tile are summed in parts, none with rows of two bins. Where bins do not fall into parts by themselves,
queries are dealt out bin by bin, eight to a part, and bins filled up to whole parts with a row that is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .reduce import Config


class Bins(NamedTuple):
    """The bins of every query and key, the same for every batch row, as a cut takes them."""

    rows: Tensor  # i, int32
    cols: Tensor  # j, int32
    shape: tuple[int, int]
    parts: int  # of a tile of rows
    dealt: Tensor | None  # the queries in the order they are dealt out; None for 0, 1, 2, ...
    whole: bool  # do the keys a thread holds belong to one bin?


def binned(rows: Tensor, cols: Tensor, shape: tuple[int, int], cut: Config, even: tuple[int, int] | None) -> Bins:
    """Bins given by their ids; `even`: how many neighbouring queries, and keys, each holds, where all hold as many."""
    whole = even is not None and even[1] % (cut.cols // cut.threads) == 0
    if even is not None and (fitting := even[0] & -even[0]) >= PART:  # the largest power of two that divides it
        return Bins(rows, cols, shape, max(cut.sides, cut.rows // fitting), None, whole)
    order = rows.argsort(stable=True)
    counts = torch.bincount(rows, minlength=shape[0])
    places = (counts + PART - 1) // PART * PART
    shift = (places - counts).cumsum(0) - (places - counts)
    total = -(-int(places.sum()) // cut.rows) * cut.rows
    dealt = torch.full((total,), rows.numel(), dtype=torch.int32, device=rows.device)
    dealt[torch.arange(rows.numel(), device=rows.device) + shift[rows[order]]] = order.to(torch.int32)
    return Bins(rows, cols, shape, cut.rows // PART, dealt, whole)


PART = 8  # rows, at least


def add_parts(total: Tensor, sums: Tensor, bins: Bins, first: int, size: int) -> None:
    """Add what each part holds of each key, `b h parts j`, to the map, in an order that never changes."""
    n = bins.rows.numel()
    if bins.dealt is None:
        leaders = torch.arange(first, first + sums.shape[2], device=sums.device) * size
    else:
        leaders = bins.dealt[::size][first : first + sums.shape[2]].long()
    by_bin = sums.new_zeros(*sums.shape[:3], bins.shape[1]).index_add_(3, bins.cols, sums)
    total.index_add_(2, bins.rows[leaders.clamp(max=n - 1)], by_bin)
