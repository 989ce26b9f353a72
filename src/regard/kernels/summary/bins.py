"""Bins of a map: the map row and column of each query and key, and the order in which queries are put into tiles.

The bins of a tile of rows are separated in one of three ways:

- parts: if every bin holds a multiple of 8 neighbouring rows, a tile is cut into parts that lie in one bin each.
- slots: otherwise queries are sorted by bin, so that a tile holds few bins, and sums per bin are a matrix product: the
  weights of the tile times a matrix with, for each row, a one in the slot of its bin.
- filled parts: maxima need parts, so each bin is padded to whole parts with a row index past the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..tiles import TileConfig, next_power_of_two

MIN_PART_ROWS = 8
MIN_SLOTS = 8  # per tile, so that the product with the slots is wide enough


class Bins(NamedTuple):
    """The bins of every query and key, for tiles of one config; all batch rows have the same bins."""

    cols: Tensor  # the map column of each key, int32
    shape: tuple[int, int]
    whole: bool  # whether the keys a thread holds always belong to one bin
    row_order: Tensor | None  # the queries in the order they fill the tiles; None for 0, 1, 2, ...
    slots: Tensor  # the slot of each row of each tile, int32; -1 past the end
    owners: Tensor  # tiles slots: the bin of each slot, -1 for unused slots; int64 if a map has 2^31 cells or more
    parts: int  # parts of a tile of rows, each within one bin; 0 if bins have slots instead


def assign_bins(
    rows: Tensor,
    cols: Tensor,
    shape: tuple[int, int],
    config: TileConfig,
    even: tuple[int, int] | None,
    parted: bool = False,
) -> Bins:
    """Return the bins with these ids, one per query and one per key.

    `even` is the number of neighbouring rows and keys in every bin but the last, None if bins differ. `parted` forces
    parts, padding the bins if necessary.
    """
    whole = even is not None and even[1] % (config.cols // config.threads) == 0
    fitting = 0 if even is None else even[0] & -even[0]  # the largest power of two that divides it
    n = rows.numel()
    row_order, parts = None, 0
    if fitting >= MIN_PART_ROWS:
        parts = max(config.sides, config.rows // fitting)
    elif parted:
        row_order, parts = _pad_bins(rows, shape[0], config.rows), config.rows // MIN_PART_ROWS
    elif bool((rows[1:] < rows[:-1]).any()):
        row_order = _pad_to_whole_tiles(rows.argsort(stable=True).to(torch.int32), n, config.rows)
    natural = torch.arange(n, device=rows.device)
    order = _pad_to_whole_tiles(natural, n, config.rows) if row_order is None else row_order.long()
    bins_by_tile = torch.where(order < n, rows[order.clamp(max=n - 1)], -1).view(-1, config.rows)
    # Even bins take the same kernel whatever their size: every row of a tile has a slot.
    slots, owners = _assign_slots(bins_by_tile, config.rows if even is not None and not parts else MIN_SLOTS)
    owners = owners if shape[0] * shape[1] < 2**31 else owners.long()
    return Bins(cols, shape, whole, row_order, slots, owners, parts)


def _pad_bins(rows: Tensor, count: int, tile: int) -> Tensor:
    """Return the queries sorted by bin, each bin padded to a multiple of MIN_PART_ROWS with the index past the end."""
    order = rows.argsort(stable=True)
    counts = torch.bincount(rows, minlength=count)
    places = (counts + MIN_PART_ROWS - 1) // MIN_PART_ROWS * MIN_PART_ROWS
    shift = (places - counts).cumsum(0) - (places - counts)
    total = -(-int(places.sum()) // tile) * tile
    padded = torch.full((total,), rows.numel(), dtype=torch.int32, device=rows.device)
    padded[torch.arange(rows.numel(), device=rows.device) + shift[rows[order]]] = order.to(torch.int32)
    return padded


def _pad_to_whole_tiles(order: Tensor, n: int, tile: int) -> Tensor:
    """Pad the order with n, the index past the end, to a multiple of `tile`."""
    return torch.cat((order, order.new_full((-n % tile,), n)))


def _assign_slots(bins: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Number the bins of each tile as they come: `tiles rows -> slots: tiles rows, owners: tiles slots`, or `least`.

    Rows without a bin are -1, and so are their slots.
    """
    has_bin = bins >= 0
    is_new = has_bin.clone()
    is_new[:, 1:] &= bins[:, 1:] != torch.cummax(bins, 1).values[:, :-1]
    slots = is_new.cumsum(1) - 1
    slot_count = max(least, next_power_of_two(int(slots.max()) + 1 if slots.numel() else 0))
    owners = torch.full((len(bins), slot_count), -1, dtype=torch.int32, device=bins.device)
    owners.scatter_(1, slots.clamp(min=0), bins.cummax(1).values.to(torch.int32))
    return torch.where(has_bin, slots, -1).to(torch.int32).contiguous(), owners


def add_parts(total: Tensor, sums: Tensor, bins: Bins, first: int, count: int) -> None:
    """Add to the map the sums `b h n j` of each part or slot of `count` tiles, in a fixed order."""
    owners = bins.owners[first : first + count]
    if bins.parts:
        slots = bins.slots[first : first + count]
        owners = owners.gather(1, slots[:, :: slots.shape[1] // bins.parts].clamp(min=0).long())
    by_bin = sums.new_zeros(*sums.shape[:3], bins.shape[1]).index_add_(3, bins.cols, sums)
    total.index_add_(2, owners.flatten().clamp(min=0), by_bin)  # sums of unused slots are 0
