"""Masks and biases as our kernels take them: a band of diagonals, lengths, lists of tiles; slopes, a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..blocks.mask_layout import contains_rule, visible_first
from ..call import Call
from ..term_cache import cached_per_term
from ..terms.biases import Added, Alibi, Bias, Relative
from ..terms.coordinates import Point
from ..terms.mask_tiles import Grid
from ..terms.masks import Causal, Diagonal, Padding, Window
from ..terms.masks.mask_algebra import Mask, conjuncts

if TYPE_CHECKING:
    from ...kernels.tiles import KernelBias, Pattern, TileLists

ENTRIES_PER_CHUNK = 2**24  # mask entries evaluated at once


@dataclass(frozen=True)
class Tiling:
    """The tile sizes of a kernel, the order of its rows (None: unchanged), and whether it loops over keys."""

    rows: int
    cols: int
    row_order: Tensor | None = None
    by_keys: bool = False


def has_kernel_form(bias: Bias) -> bool:
    """True if the kernels can add this bias."""
    return isinstance(bias, (Alibi, Added)) or (isinstance(bias, Relative) and bias.table is not None)


def kernel_bias(call: Call) -> KernelBias:
    """The bias of a call."""
    from ...kernels.tiles import KernelBias

    _, h, n_i, n_j = call.shape
    match call.bias:
        case Alibi() as bias:
            return KernelBias(slopes=bias._tensor(call.q.device, torch.float32).contiguous())
        case Added(values=values):
            return KernelBias(values=values[(None,) * (4 - values.ndim)])
        case Relative() as bias:
            # A number a distance: walked forward along rows and backward along keys.
            heads = torch.arange(h, device=call.q.device)[:, None]
            gaps = torch.arange(1 - n_j, n_i, device=call.q.device) + call.offset
            line = bias.over(Point(heads * 0, heads, gaps.clamp(min=0), (-gaps).clamp(min=0)))
            line = line.expand(h, -1).contiguous()
            return KernelBias(values=line, origin=n_j - 1, steps=(0, line.stride(0), 1, -1))
    return KernelBias()


@dataclass(frozen=True)
class _MaskParts:
    """The part of a mask that is a band of diagonals and lengths; `rest` is True if other terms remain."""

    low: int
    high: int
    lengths: Tensor | None
    rest: bool


def band_pattern(call: Call) -> Pattern | None:
    """The mask of a call, if it is a band of diagonals and lengths and no more; else None."""
    from ...kernels.tiles import Pattern

    parts = _mask_parts(call)
    return None if parts.rest else Pattern(parts.low, parts.high, parts.lengths)


def mask_pattern(call: Call, tiling: Tiling) -> Pattern:
    """The mask of a call; lists of tiles are cached per mask."""
    from ...kernels.tiles import Pattern

    band = band_pattern(call)
    if band is not None:
        return band
    assert call.mask is not None
    mask = call.mask
    if contains_rule(mask):
        return Pattern(lists=_lists(mask, call, tiling))
    # The order of rows is part of the key by identity: two orders may have one length.
    key = (call.shape, call.offset, call.q.device, tiling.rows, tiling.cols, tiling.row_order, tiling.by_keys)
    return Pattern(lists=cached_per_term(mask, key, lambda: _lists(mask, call, tiling)))


def _mask_parts(call: Call) -> _MaskParts:
    from ...kernels.tiles import UNBOUNDED

    low, high, rest = -UNBOUNDED, UNBOUNDED, False
    lengths: Tensor | None = None
    for term in conjuncts(call.mask):
        match term:
            case Causal():
                low = max(low, 0)
            case Window() if term.has_one_reach:
                before, after = term.reach
                low, high = max(low, -after), min(high, before)
            case Diagonal():
                low, high = max(low, 0), min(high, 0)
            case Padding() if not (isinstance(term.keys, Tensor) and term.keys.dtype == torch.bool):
                here = term.keys_on(call.q.device).to(torch.int32).expand(call.shape[0])
                lengths = here.contiguous() if lengths is None else torch.minimum(lengths, here)
            case _:
                rest = True
    return _MaskParts(low, high, lengths, rest)


def _lists(mask: Mask, call: Call, tiling: Tiling) -> TileLists:
    """The tiles a mask leaves: those with every entry visible, and the others, rows in the order of the tiling."""
    from ...kernels.tiles import TileLists

    _, _, n_i, n_j = call.shape
    rows, cols = tiling.rows, tiling.cols
    row_order = torch.arange(-(-n_i // rows) * rows, device=call.q.device)
    row_order = row_order if tiling.row_order is None else tiling.row_order.long()
    block = replace(call.whole(), rows=slice(0, row_order.numel()), row_ids=row_order.clamp(max=n_i - 1))
    grid = Grid(block, rows, cols)
    shape = row_order.numel() // rows, -(-n_j // cols)
    tiles = mask.tiles(grid)
    each = torch.broadcast_shapes(_own_masks(mask, call), *(x.shape[:2] for x in tiles))
    some, full = (x.expand(*each, *shape) for x in tiles)
    # Tiles in which i - j changes sign, and tiles past the last key, are evaluated entry by entry.
    crossing = (grid.distance.low <= 0) & (grid.distance.high >= 0)
    ragged = torch.arange(shape[1], device=row_order.device) >= n_j // cols
    full = some & full & ~crossing & ~ragged
    part = some & ~full
    bits = _bits(mask, call, part, row_order, tiling)
    where = part.flatten().cumsum(0).view(part.shape).to(torch.int32) - 1
    if tiling.by_keys:
        part, full, where = part.mT.contiguous(), full.mT.contiguous(), where.mT
    part_counts, part_tiles = visible_first(part)
    full_counts, full_tiles = visible_first(full)
    return TileLists(full_counts, full_tiles, part_counts, part_tiles, where.gather(-1, part_tiles.long()), bits)


def _own_masks(mask: Mask, call: Call) -> tuple[int, int]:
    """`b|1 h|1`: whether batch rows and heads have masks of their own, which the tiles of a `Rule` need not show."""
    entry = mask.over(replace(call.whole(), rows=slice(0, 1), cols=slice(0, 1)))
    b, h, _, _ = (1,) * (4 - entry.ndim) + entry.shape
    return b, h


def _bits(mask: Mask, call: Call, part: Tensor, row_order: Tensor, tiling: Tiling) -> Tensor:
    """The visible entries of each partly visible tile as bits: `n rows cols/32`."""
    from ...kernels.tiles import pack_bits

    _, _, n_i, n_j = call.shape
    rows, cols = tiling.rows, tiling.cols
    b, h, r, c = part.nonzero(as_tuple=True)
    packed = [torch.zeros(0, rows, cols // 32, dtype=torch.int32, device=part.device)]
    bound = mask.with_tensors(call.q.device, call.dtype).bind(call.q, call.k, call.offset)
    step = max(1, ENTRIES_PER_CHUNK // (rows * cols))
    for start in range(0, b.numel(), step):
        at = slice(start, start + step)
        row = row_order.view(-1, rows)[r[at]][:, :, None]
        col = (c[at, None] * cols + torch.arange(cols, device=part.device))[:, None, :]
        seen = bound(b[at, None, None], h[at, None, None], row.clamp(max=n_i - 1), col.clamp(max=n_j - 1))
        packed.append(pack_bits(seen & (row < n_i) & (col < n_j)))
    return torch.cat(packed)
