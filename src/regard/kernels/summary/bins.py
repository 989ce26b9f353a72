"""Bins of a map: which row and which column of it each query and each key adds to, and how queries are dealt out.

Where bins fall into parts of a tile by themselves, eight rows and more, sums and the largest are told apart by parts.
Otherwise queries are dealt out bin by bin, so that a tile of rows holds few bins, and sums are told apart by a product:
the tile's weights times a matrix that has, for each row, a one in the slot of its bin. For the largest, bins are filled
up to whole parts with a row that is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..tiles import power_of_two

if TYPE_CHECKING:
    from .generic import Config


class Bins(NamedTuple):
    """The bins of every query and key, the same for every batch row, as a cut takes them."""

    cols: Tensor  # of each key, int32
    shape: tuple[int, int]
    whole: bool  # do the keys a thread holds belong to one bin?
    dealt: Tensor | None  # the queries in the order they are dealt out; None for 0, 1, 2, ...
    slots: Tensor  # of each row of each tile, int32; -1 past the end
    owners: Tensor  # tiles slots: the bin of each slot, -1 where there is none; int64 where a map takes that
    parts: int  # of a tile of rows, none with rows of two bins; 0 where there are no such parts


def binned(
    rows: Tensor, cols: Tensor, shape: tuple[int, int], cut: Config, even: tuple[int, int] | None, parted: bool = False
) -> Bins:
    """Bins given by their ids; `even`: how many neighbours each holds, where all do, but for the last ones.

    `parted`: in parts, whatever it takes.
    """
    whole = even is not None and even[1] % (cut.cols // cut.threads) == 0
    fitting = 0 if even is None else even[0] & -even[0]  # the largest power of two that divides it
    n = rows.numel()
    dealt, parts = None, 0
    if fitting >= PART:
        parts = max(cut.sides, cut.rows // fitting)
    elif parted:
        dealt, parts = _filled_up(rows, shape[0], cut.rows), cut.rows // PART
    elif bool((rows[1:] < rows[:-1]).any()):
        dealt = _to_whole_tiles(rows.argsort(stable=True).to(torch.int32), n, cut.rows)
    order = _to_whole_tiles(torch.arange(n, device=rows.device), n, cut.rows) if dealt is None else dealt.long()
    by_place = torch.where(order < n, rows[order.clamp(max=n - 1)], -1).view(-1, cut.rows)
    slots, owners = _slots(by_place)
    owners = owners if shape[0] * shape[1] < 2**31 else owners.long()
    return Bins(cols, shape, whole, dealt, slots, owners, parts)


PART = 8  # rows, at least
FEWEST = 8  # slots, as a product takes them


def _filled_up(rows: Tensor, count: int, tile: int) -> Tensor:
    order = rows.argsort(stable=True)
    counts = torch.bincount(rows, minlength=count)
    places = (counts + PART - 1) // PART * PART
    shift = (places - counts).cumsum(0) - (places - counts)
    total = -(-int(places.sum()) // tile) * tile
    dealt = torch.full((total,), rows.numel(), dtype=torch.int32, device=rows.device)
    dealt[torch.arange(rows.numel(), device=rows.device) + shift[rows[order]]] = order.to(torch.int32)
    return dealt


def _to_whole_tiles(order: Tensor, n: int, tile: int) -> Tensor:
    """The order, filled up with a row that is not there."""
    return torch.cat((order, order.new_full((-n % tile,), n)))


def _slots(bins: Tensor) -> tuple[Tensor, Tensor]:
    """A slot for each bin of a tile, in the order they come, and whose it is: `tiles rows -> tiles rows, tiles slots`.

    Rows without a bin are -1, and so are their slots.
    """
    there = bins >= 0
    new = there.clone()
    new[:, 1:] &= bins[:, 1:] != torch.cummax(bins, 1).values[:, :-1]
    slots = new.cumsum(1) - 1
    wide = max(FEWEST, power_of_two(int(slots.max()) + 1 if slots.numel() else 0))
    owners = torch.full((len(bins), wide), -1, dtype=torch.int32, device=bins.device)
    owners.scatter_(1, slots.clamp(min=0), bins.cummax(1).values.to(torch.int32))
    return torch.where(there, slots, -1).to(torch.int32).contiguous(), owners


def add_parts(total: Tensor, sums: Tensor, bins: Bins, first: int, count: int) -> None:
    """Add what each part, or slot, of these tiles holds of each key, `b h n j`, to the map, always in one order."""
    owners = bins.owners[first : first + count]
    if bins.parts:
        slots = bins.slots[first : first + count]
        owners = owners.gather(1, slots[:, :: slots.shape[1] // bins.parts].clamp(min=0).long())
    by_bin = sums.new_zeros(*sums.shape[:3], bins.shape[1]).index_add_(3, bins.cols, sums)
    total.index_add_(2, owners.flatten().clamp(min=0), by_bin)  # those of no bin are 0
