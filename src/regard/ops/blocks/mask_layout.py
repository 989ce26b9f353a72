"""The tiles and the keys of a matrix that a mask leaves visible, for kernels that skip the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..call import Call
from ..terms.mask_tiles import Grid
from ..terms.masks import Rule
from ..terms.masks.mask_algebra import Mask

TILE = 128  # rows and columns of a tile
ENTRIES_PER_CHUNK = 2**24  # mask entries evaluated at once


@dataclass(frozen=True, eq=False)
class MaskLayout:
    """The tiles of `TILE` x `TILE` entries, and the keys, that a mask leaves visible."""

    some: Tensor  # b|1 h|1 rows cols: True if some entry may be visible
    full: Tensor  # b|1 h|1 rows cols: True if every entry is visible
    seen: Tensor | None  # b|1 1 1 j: keys that some query sees; None if all are, or if unknown


def mask_layout(mask: Mask, call: Call) -> MaskLayout:
    """The tiles and keys of a call that its mask leaves visible."""
    block = call.whole()
    some, full = mask.tiles(Grid(block, TILE, TILE))
    shape = -(-call.shape[2] // TILE), -(-call.shape[3] // TILE)
    some, full = (x.expand(*x.shape[:2], *shape).contiguous() for x in (some, full & some))
    # A rule may read state that changes between calls, so its visible keys must not be cached.
    seen = None if contains_rule(mask) else _visible_keys(mask, call)
    return MaskLayout(some, full, None if seen is None or bool(seen.all()) else seen)


def _visible_keys(mask: Mask, call: Call) -> Tensor:
    """Keys that some query of a batch row sees, `b|1 1 1 j`."""
    b, h, i, j = call.shape
    found = torch.zeros(1, 1, 1, j, dtype=torch.bool, device=call.q.device)
    rows = max(1, ENTRIES_PER_CHUNK // (b * h * j))
    for start in range(0, i, rows):
        part = mask.over(replace(call.whole(), rows=slice(start, min(start + rows, i))))
        part = part[(None,) * (4 - part.ndim)]
        found = found | part.any(2, keepdim=True).any(1, keepdim=True)
        if part.shape[2] == 1:
            break  # the same for every query
    return found


def contains_rule(mask: Mask) -> bool:
    """True if some part of a mask is a `Rule`, which may read state that changes between calls."""
    parts = (getattr(mask, name) for name in mask.__dataclass_fields__)
    return isinstance(mask, Rule) or any(contains_rule(part) for part in parts if isinstance(part, Mask))


def visible_first(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of tiles, `b h rows cols`: the number of visible ones, and all column indices, visible ones first."""
    counts = tiles.sum(-1, dtype=torch.int32)
    return counts, tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
