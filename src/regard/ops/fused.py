"""Reductions of the weights by one kernel, from q, k and the row statistic, where there is one for the call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backends import triton
from .backends.kernels import product
from .biases import Added, Alibi, Bias, Relative
from .bins import even_bins
from .call import Call
from .grid import Grid
from .layout import remembered
from .mask import And, Mask
from .masks import Causal, Diagonal, Padding, Rule, Window
from .normalizers import SinkSoftmax, Softmax
from .place import Point
from .scores import Bilinear, Cosine, Dot, Location
from .tracing import followed

if TYPE_CHECKING:
    from ..kernels.reduce import Bins, Config
    from ..kernels.tiles import Bias as KernelBias
    from ..kernels.tiles import Lists, Pattern

CHUNK = 2**24  # entries of a mask looked at one by one at a time


def objections(call: Call) -> list[str]:
    """What keeps the kernel from reducing the weights of a call."""
    found = triton.unavailable(call)
    if not isinstance(call.score, (Dot, Cosine, Bilinear, Location)):
        found.append(f"{type(call.score).__name__} is no product of queries and keys")
    if not isinstance(call.normalize, (Softmax, SinkSoftmax)):
        found.append(f"the kernel is softmax, not {type(call.normalize).__name__}")
    if call.bias is not None and not _expressible(call.bias):
        found.append(f"the kernel has no {type(call.bias).__name__}")
    if call.k.shape[-1] > 256:
        found.append(f"the kernel takes widths up to 256, got {call.k.shape[-1]}")
    if any(ids is not None for ids in (call.batch_ids, call.head_ids, call.row_ids)):
        found.append("it takes whole problems, not selections of rows and heads")
    if followed():
        found.append("it is launched uncompiled")
    return found


def reduced(
    call: Call, statistic: Tensor, want: frozenset[str], map_shape: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Any of "entropy", "received", "max", "distance", and a map of bin sums, from the row statistic `b h i 1`."""
    from ..kernels.reduce import config, dealt_rows, reduce

    q, k, scale = product(call)
    _, _, n_i, n_j = call.shape
    cut = config(q.shape[-1], q.dtype)
    bins = None if map_shape is None else _even_bins(n_i, n_j, map_shape, q.device)
    rows = None if bins is None or not n_i else dealt_rows(bins, n_i, cut)[1]
    found = reduce(
        q,
        k,
        statistic.squeeze(-1).to(torch.float32),
        want=want,
        scale=scale,
        offset=call.offset,
        cap=call.score.cap if isinstance(call.score, Dot) else None,
        pattern=_pattern(call, cut, rows),
        bias=_bias(call),
        bins=bins,
        cut=cut,
    )
    return {name: value for name, value in found._asdict().items() if value is not None}


def _even_bins(n_i: int, n_j: int, shape: tuple[int, int], device: torch.device) -> Bins:
    """Query r in row r * rows // i, key j in column j * cols // j."""
    from ..kernels.reduce import Bins

    rows, cols = shape
    by_row, by_col = (even_bins(n, count, device)[0].to(torch.int32) for n, count in ((n_i, rows), (n_j, cols)))
    return Bins(by_row, by_col, shape, (n_i // rows, n_j // cols), n_i % rows == 0 and n_j % cols == 0)


def _expressible(bias: Bias) -> bool:
    return isinstance(bias, (Alibi, Added)) or (isinstance(bias, Relative) and bias.table is not None)


def _bias(call: Call) -> KernelBias:
    from ..kernels.tiles import Bias as KernelBias

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
class _Read:
    """What a mask says of a band of diagonals and of lengths; `rest` must be looked at tile by tile."""

    low: int
    high: int
    lengths: Tensor | None
    rest: bool


def _pattern(call: Call, cut: Config, rows: Tensor | None) -> Pattern:
    from ..kernels.tiles import Pattern

    read = _read(call)
    if not read.rest:
        return Pattern(read.low, read.high, read.lengths)
    assert call.mask is not None
    mask = call.mask
    if _changes(mask):
        return Pattern(lists=_lists(mask, call, cut, rows))
    key = (call.shape, call.offset, call.q.device, cut, None if rows is None else rows.numel())
    return Pattern(lists=remembered(mask, key, lambda: _lists(mask, call, cut, rows)))


def _read(call: Call) -> _Read:
    from ..kernels.tiles import FAR

    low, high, rest = -FAR, FAR, False
    lengths: Tensor | None = None
    for term in _conjuncts(call.mask):
        match term:
            case Causal():
                low = max(low, 0)
            case Window():
                before, after = term.reach
                low, high = max(low, -after), min(high, before)
            case Diagonal():
                low, high = max(low, 0), min(high, 0)
            case Padding() if not (isinstance(term.keys, Tensor) and term.keys.dtype == torch.bool):
                here = torch.as_tensor(term.keys, device=call.q.device).to(torch.int32).expand(call.shape[0])
                lengths = here.contiguous() if lengths is None else torch.minimum(lengths, here)
            case _:
                rest = True
    return _Read(low, high, lengths, rest)


def _conjuncts(mask: Mask | None) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.left)
        yield from _conjuncts(mask.right)
    elif mask is not None:
        yield mask


def _changes(mask: Mask) -> bool:
    """A rule may read what changes between calls."""
    parts = (getattr(mask, name) for name in mask.__dataclass_fields__)
    return isinstance(mask, Rule) or any(_changes(part) for part in parts if isinstance(part, Mask))


def _lists(mask: Mask, call: Call, cut: Config, rows: Tensor | None) -> Lists:
    """The tiles a mask leaves, by rows as they are dealt out: those with every entry visible, and the others."""
    from ..kernels.tiles import Lists

    _, _, n_i, n_j = call.shape
    dealt = torch.arange(-(-n_i // cut.rows) * cut.rows, device=call.q.device) if rows is None else rows.long()
    block = replace(call.whole(), rows=slice(0, dealt.numel()), row_ids=dealt.clamp(max=n_i - 1))
    grid = Grid(block, cut.rows, cut.cols)
    shape = dealt.numel() // cut.rows, -(-n_j // cut.cols)
    some, full = (x.expand(*x.shape[:2], *shape) for x in mask.tiles(grid))
    # Where distances change sign, and at the ragged end, entries are looked at one by one.
    crossing = (grid.distance.low <= 0) & (grid.distance.high >= 0)
    ragged = torch.arange(shape[1], device=dealt.device) >= n_j // cut.cols
    full = some & full & ~crossing & ~ragged
    some, full = some.contiguous(), full.contiguous()
    part = some & ~full
    where = part.flatten().cumsum(0).view(part.shape).to(torch.int32) - 1
    part_counts, part_tiles = _ordered(part)
    full_counts, full_tiles = _ordered(full)
    bits = _bits(mask, call, part, dealt, cut)
    return Lists(full_counts, full_tiles, part_counts, part_tiles, where.gather(-1, part_tiles.long()), bits)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles holds, and which, those first."""
    counts = tiles.sum(-1, dtype=torch.int32)
    return counts, tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def _bits(mask: Mask, call: Call, part: Tensor, dealt: Tensor, cut: Config) -> Tensor:
    """The entries of each partly visible tile: n rows cols/8, uint8."""
    from ..kernels.tiles import pack

    _, _, n_i, n_j = call.shape
    b, h, r, c = part.nonzero(as_tuple=True)
    packed = [torch.zeros(0, cut.rows, cut.cols // 8, dtype=torch.uint8, device=part.device)]
    bound = mask.lifted(call.q.device, call.dtype).bind(call.q, call.k, call.offset)
    step = max(1, CHUNK // (cut.rows * cut.cols))
    for start in range(0, b.numel(), step):
        at = slice(start, start + step)
        row = dealt.view(-1, cut.rows)[r[at]][:, :, None]
        col = (c[at, None] * cut.cols + torch.arange(cut.cols, device=part.device))[:, None, :]
        seen = bound(b[at, None, None], h[at, None, None], row.clamp(max=n_i - 1), col.clamp(max=n_j - 1))
        packed.append(pack(seen & (row < n_i) & (col < n_j)))
    return torch.cat(packed)
