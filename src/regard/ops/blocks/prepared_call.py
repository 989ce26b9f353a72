"""PreparedCall: one attention after its work per token, and its matrix cut into blocks of rows.

A block is some rows against every key they can see. Because it holds whole rows, any normalizer can run on it, and
because empty tiles are left out of it, a sparse mask costs what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..call import Call
from ..terms.biases import Bias
from ..terms.coordinates import Block, Selector, take_entries
from ..terms.mask_tiles import Grid
from ..terms.masks.mask_algebra import Mask
from ..terms.normalizers import Normalizer
from ..terms.scores import Additive, Score, select_heads
from ..torch_state import has_no_values, is_traced
from .tile_weights import PlannedBlock

Flags = npt.NDArray[np.bool_]

ROWS_PER_BLOCK = 192
KEYS_PER_TILE = 64  # a tile that no row of its block sees is skipped
FEW_ROWS = 16  # queries so few that reading keys costs more than attending to them
SCORES_PER_BLOCK = 2**21


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call after the work per token: q and k as `Score.prepare` returned them, the terms, and the row statistic."""

    q: Tensor  # b h i d
    k: Tensor  # b g j d
    whole: Block  # the matrix as a single block, with the query as the user passed it
    g: int  # the number of key heads
    score: Score
    mask: Mask | None
    bias: Bias | None
    normalize: Normalizer
    nonfinite_keys: Tensor | None = None  # b j, keys that hold NaN, Inf or huge numbers; None if there are none
    statistic: Tensor | None = None  # b h i 1
    dense: bool = False  # the whole matrix as one block, for the reference
    kernel: bool = False  # additive scores by the Triton kernel

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """b h i j."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    def tensors(self) -> list[Tensor]:
        """Every tensor that a block may read."""
        terms = (self.score, self.mask, self.bias, self.normalize)
        return [self.q, self.k, self.whole.q, *(x for term in terms if term is not None for x in term.tensors())]

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> PreparedCall:
        """The same call over other tensors, visited in the order of `tensors()`."""
        return replace(
            self,
            q=fn(self.q),
            k=fn(self.k),
            whole=replace(self.whole, q=fn(self.whole.q)),
            score=self.score.map_tensors(fn),
            mask=None if self.mask is None else self.mask.map_tensors(fn),
            bias=None if self.bias is None else self.bias.map_tensors(fn),
            normalize=self.normalize.map_tensors(fn),
        )

    def block(self, batch: slice, heads: slice, rows: slice, cols: Selector) -> Block:
        """The block at these batch rows, heads, rows and keys."""
        return replace(self.whole, batch=batch, heads=heads, rows=rows, cols=cols)


def prepare(
    call: Call, statistic: Tensor | None = None, *, finite: bool = False, reads_hidden: bool = False
) -> PreparedCall:
    """Do the work per token, in the dtype of accumulation.

    `finite`: the caller knows that every value is finite. `reads_hidden`: it also reads keys that no query sees.
    """
    score = call.score
    if isinstance(score, Additive) and call.head_ids is not None:
        score = Additive(select_heads(score.u, 2, call.head_ids))
    # A hidden key must change nothing, NaN included. While PyTorch traces, values cannot be read.
    may_skip_scan = (
        finite
        or call.mask is None
        or is_traced()
        or has_no_values(call.q)
        or all_values_finite(call, slice(None) if reads_hidden else keys_read(call))
    )
    prepared = PreparedCall(
        call.q.to(call.dtype),
        call.k.to(call.dtype),
        call.whole(),
        g=call.k.shape[1],
        score=score,
        mask=call.mask,
        bias=call.bias,
        normalize=call.normalize,
        nonfinite_keys=None if may_skip_scan else _find_nonfinite_keys(call),
        statistic=statistic,
        dense=call.backend == "reference",
    )
    q, k = (prepared.q, prepared.k) if prepared.nonfinite_keys is None else _zero_hidden_tokens(prepared)
    q, k = call.score.prepare(q, k, call.head_ids)
    return replace(prepared, q=q, k=k)


def planned_blocks(prepared: PreparedCall) -> Iterator[PlannedBlock]:
    """The blocks that cover every visible entry of the matrix, in a fixed order."""
    b, h, i, j = prepared.shape
    if not (b and h and i and j):
        return
    if prepared.dense:
        whole = PlannedBlock(prepared.whole, None if prepared.mask is None else slice(0, j))
        yield from [whole] if prepared.nonfinite_keys is None else split_until_uniform(prepared, whole)
        return
    entries = SCORES_PER_BLOCK if prepared.q.is_cpu else 32 * SCORES_PER_BLOCK  # a GPU needs larger blocks to be busy
    rows = min(i, ROWS_PER_BLOCK if prepared.q.is_cpu else 8 * ROWS_PER_BLOCK, max(16, entries // j))
    for start, some, full in row_tiles(prepared, rows):
        widest = int(some.any((0, 1)).sum()) * KEYS_PER_TILE
        if not widest:
            continue
        fit = max(1, entries // (rows * min(widest, j)))
        for batch, heads in _batch_and_head_slices(b, h, prepared.g, fit):
            any_visible = np.any(flags_of(some, batch, heads), axis=(0, 1))
            all_visible = np.all(flags_of(full, batch, heads), axis=(0, 1))
            keys = visible_keys(any_visible, all_visible, prepared)
            if keys is not None:
                cols, masked = keys
                block = prepared.block(batch, heads, slice(start, min(start + rows, i)), cols)
                planned = PlannedBlock(block, None if prepared.mask is None else masked)
                yield from [planned] if prepared.nonfinite_keys is None else split_until_uniform(prepared, planned)


def take_visible(prepared: PreparedCall, block: Block, x: Tensor, index: tuple[slice, slice, Selector]) -> Tensor:
    """A block's part of keys or values; if some keys are not finite, those hidden from the whole block are set to 0."""
    x = block.take(x, index)
    if prepared.nonfinite_keys is None:
        return x
    seen = _visibility(prepared, block).any(-2)
    seen = seen.unflatten(1, (x.shape[1], -1)).any(2)
    return torch.where(seen[..., None], x, 0.0)


def visible_key_range(call: Call) -> tuple[slice, int, bool]:
    """The keys from the first to the last tile that some query may see, how many of them, and True if all see all."""
    assert call.mask is not None
    _, _, i, j = call.shape
    tiles = call.mask.tiles(Grid(call.whole(), i, KEYS_PER_TILE))
    cols = -(-j // KEYS_PER_TILE)
    some, full = (x.expand(*x.shape[:3], cols) for x in tiles)
    visible = some.flatten(0, -2).any(0).nonzero()[:, 0]
    if not visible.numel():
        return slice(0, 0), 0, False
    first, last = int(visible[0]), int(visible[-1])
    is_full = bool((some & full)[..., first : last + 1].all())
    return slice(first * KEYS_PER_TILE, min((last + 1) * KEYS_PER_TILE, j)), visible.numel() * KEYS_PER_TILE, is_full


def keys_read(call: Call) -> slice:
    """The keys that the blocks of a call may read. Looked up for few queries, which read few."""
    if call.mask is None or call.backend == "reference" or call.shape[2] > FEW_ROWS or 0 in call.shape:
        return slice(None)
    return visible_key_range(call)[0]


def all_values_finite(call: Call, keys: slice = slice(None)) -> bool:
    """True unless a tensor holds NaN, Inf or numbers so large that a product may overflow, among the keys that count.

    If a mask hides such a number, it must change nothing, but plain arithmetic would let it through.
    """
    biases = [] if call.bias is None else [x for x in call.bias.tensors() if x.is_floating_point()]
    values = [] if call.v is None else [call.v[:, :, keys]]
    return all(is_safe(x) for x in (call.q, call.k[:, :, keys], *values)) and all(_is_safe_above(x) for x in biases)


def is_finite(x: Tensor) -> bool:
    """False if an entry is NaN or Inf, or if their sum overflows: one pass, faster than the norm."""
    return math.isfinite((x.detach() if x.requires_grad else x).sum(dtype=torch.float32))


def is_safe(x: Tensor) -> bool:
    """True if every entry is small enough to multiply: no entry exceeds the norm, and NaN compares False."""
    norm = torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))
    return float(norm) < _largest_safe_value(x)


def _is_safe_above(x: Tensor) -> bool:
    # -inf in a bias hides an entry, and is safe.
    return not x.numel() or bool(x.detach().amax() < _largest_safe_value(x))


def _largest_safe_value(x: Tensor) -> float:
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).max ** 0.5 / 16


def _find_nonfinite_keys(call: Call) -> Tensor:
    """Keys that are not finite, or too large, in any head or feature of k or v: `b j`."""
    values = [] if call.v is None else [call.v]
    bad = [~(x.detach().abs() < _largest_safe_value(x)).all(-1).all(1) for x in (call.k, *values)]
    return bad[0] if len(bad) == 1 else bad[0] | bad[1]


def _zero_hidden_tokens(prepared: PreparedCall) -> tuple[Tensor, Tensor]:
    """q and k with queries that see no key, and keys that no query sees, set to 0."""
    b, h, i, j = prepared.shape
    rows = torch.zeros(b, h, i, dtype=torch.bool, device=prepared.q.device)
    keys = torch.zeros(b, j, dtype=torch.bool, device=prepared.q.device)
    for planned in planned_blocks(replace(prepared, nonfinite_keys=None)):
        block = planned.block
        seen = _visibility(prepared, block)
        rows[block.batch, block.heads, block.rows] = seen.any(-1)
        keys[block.batch, block.cols] |= seen.any(-2).any(1)
    return torch.where(rows[..., None], prepared.q, 0.0), torch.where(keys[:, None, :, None], prepared.k, 0.0)


def row_tiles(prepared: PreparedCall, rows: int) -> Iterator[tuple[int, Flags, Flags]]:
    """For each row tile: its first row, and which key tiles have some or all entries visible, b|1 h|1 tiles."""
    _, _, i, j = prepared.shape
    cols = -(-j // KEYS_PER_TILE)
    if prepared.mask is None:
        everything = np.ones((1, 1, cols), dtype=bool)
        yield from ((start, everything, everything) for start in range(0, i, rows))
        return
    whole = prepared.whole
    if has_no_values(whole.q):  # every tile might be visible
        some, full = np.ones((1, 1, cols), dtype=bool), np.zeros((1, 1, cols), dtype=bool)
        yield from ((start, some, full) for start in range(0, i, rows))
        return
    stride = rows * max(1, SCORES_PER_BLOCK // cols)
    for first in range(0, i, stride):
        last = min(first + stride, i)
        tiles = prepared.mask.tiles(Grid(replace(whole, rows=slice(first, last)), rows, KEYS_PER_TILE))
        count = -(-(last - first) // rows)
        some, full = (x.expand(*x.shape[:2], count, cols).cpu().numpy() for x in tiles)
        yield from ((first + n * rows, some[:, :, n], full[:, :, n]) for n in range(count))


def _batch_and_head_slices(b: int, h: int, g: int, fit: int) -> Iterator[tuple[slice, slice]]:
    """Batch rows and heads, about `fit` of them at a time: whole groups that share a key head, or even parts of one."""
    group = h // g
    if fit >= h:
        batch, heads = fit // h, h
    elif fit >= group:
        batch, heads = 1, fit // group * group
    else:
        batch, heads = 1, max(n for n in range(1, group + 1) if group % n == 0 and n <= fit)
    for b0 in range(0, b, batch):
        for h0 in range(0, h, heads):
            yield slice(b0, min(b0 + batch, b)), slice(h0, min(h0 + heads, h))


def flags_of(flags: Flags, batch: slice, heads: slice) -> Flags:
    """The flags of some batch rows and heads, from flags `b|1 h|1 tiles`."""
    return flags[batch if flags.shape[0] > 1 else slice(None), heads if flags.shape[1] > 1 else slice(None)]


def visible_keys(some: Flags, full: Flags, prepared: PreparedCall) -> tuple[Selector, slice | None] | None:
    """The keys of the visible tiles, and which of them need the mask entry by entry; None where there are none."""
    j = prepared.k.shape[2]
    tiles = np.flatnonzero(some)
    if not tiles.size:
        return None
    first, last = int(tiles[0]), int(tiles[-1])
    if last - first + 1 > tiles.size:
        scattered = (tiles[:, None] * KEYS_PER_TILE + np.arange(KEYS_PER_TILE)).ravel()
        scattered = scattered[scattered < j]
        return torch.from_numpy(scattered).to(prepared.q.device), slice(0, scattered.size)
    cols = slice(first * KEYS_PER_TILE, min((last + 1) * KEYS_PER_TILE, j))
    part = np.flatnonzero(~full[first : last + 1])
    if not part.size:
        return cols, None
    return cols, slice(int(part[0]) * KEYS_PER_TILE, min((int(part[-1]) + 1) * KEYS_PER_TILE, cols.stop - cols.start))


def _visibility(prepared: PreparedCall, block: Block) -> Tensor:
    assert prepared.mask is not None
    n_j = block.j.numel()
    shape = (block.b.numel(), block.h.numel(), block.row.numel(), n_j)
    return prepared.mask.over(replace(block, take=take_entries)).expand(shape)


def split_until_uniform(prepared: PreparedCall, planned: PlannedBlock) -> Iterator[PlannedBlock]:
    """Split a block until every row sees the same of its non-finite keys: a key is visible to all rows, or to none."""
    block = planned.block
    assert prepared.nonfinite_keys is not None
    garbage = prepared.nonfinite_keys[block.batch][:, block.cols]
    seen = _visibility(prepared, block)
    mixed = (seen.any(-2).any(1) & ~seen.all(-2).all(1) & garbage).any()
    rows, heads = block.rows, block.heads
    if not bool(mixed) or block.row.numel() == block.h.numel() == 1:
        yield PlannedBlock(block, slice(0, block.j.numel()))
        return
    if block.h.numel() > 1:
        parts = [replace(block, heads=slice(n, n + 1)) for n in range(heads.start, heads.stop)]
    else:
        middle = (rows.start + rows.stop) // 2
        parts = [replace(block, rows=slice(rows.start, middle)), replace(block, rows=slice(middle, rows.stop))]
    for part in parts:
        yield from split_until_uniform(prepared, PlannedBlock(part, planned.masked))
