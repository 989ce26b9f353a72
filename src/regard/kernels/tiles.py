"""What the kernels share: one tile of log2 A, and which tiles of the matrix there are to visit.

    log2 A_ij = (q_i . k_j * scale + bias_ij - lse_i) / ln 2,    -inf where the mask hides j from i.

A mask comes as a `Pattern`. What a band of diagonals and a length per batch row say is worked out in the kernel; any
other mask comes as lists of tiles: those with every entry visible, and those with some, each with a bit an entry.
Tiles that need a look at single entries (partly hidden, ragged, or crossing the diagonal, where distances change sign)
are walked apart from the others, which are most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FAR = 2**30  # farther than any two positions
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEVER: tl.constexpr = tl.constexpr(-1e30)  # stands for -inf: 2 to its power is 0, and 0 times it is 0


class Lists(NamedTuple):
    """The tiles to visit for each tile of the axis that stays: `b|1 h|1 tiles`, and `b|1 h|1 tiles most`."""

    full_counts: Tensor
    full: Tensor
    part_counts: Tensor
    part: Tensor
    where: Tensor  # of each tile in part, its place in bits
    bits: Tensor  # n rows cols/32, int32: bit c % 32 of word c // 32 is column c


class Pattern(NamedTuple):
    """The query at i sees the key at j if low <= i - j <= high, j < lengths[b], and the lists agree."""

    low: int = -FAR
    high: int = FAR
    lengths: Tensor | None = None
    lists: Lists | None = None

    def of(self, batch: slice) -> Pattern:
        """The same for some batch rows."""
        lengths = None if self.lengths is None else _taken(self.lengths, batch)
        if self.lists is None:
            return self._replace(lengths=lengths)
        *tiles, bits = self.lists
        return self._replace(lengths=lengths, lists=Lists._make([*(_taken(x, batch) for x in tiles), bits]))


class Bias(NamedTuple):
    """What is added to the scores: -slopes[h] * abs(i - j), or values.

    Values broadcast over b h i j; where `steps` are given, the entry of (b, h, i, j) lies at `origin` plus the product
    of the four with them.
    """

    slopes: Tensor | None = None
    values: Tensor | None = None
    origin: int = 0
    steps: tuple[int, int, int, int] | None = None

    def of(self, batch: slice) -> Bias:
        """The same for some batch rows."""
        if self.values is None or self.steps is not None:
            return self
        return self._replace(values=_taken(self.values, batch))


EVERYTHING = Pattern()
NOTHING = Bias()


@triton.jit
def log2_weights(
    s,  # [I, J] or [J, I], products of queries and keys
    lse2,  # of the query, log2, broadcastable
    row,  # query rows, broadcastable
    col,  # keys, broadcastable
    offset,
    scale,
    slope,
    BIAS,  # pointer at this batch row and head
    bias_i,
    bias_j,
    n_i,
    n_j,
    low,
    high,
    BITS,  # pointer at this tile's bits, rows of J / 32 words
    local_row,
    local_col,
    J: tl.constexpr,
    CAP: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """log2 A of one tile; hidden entries, and those past the end, are NEVER."""
    if CAP is None:
        t = s * (scale * LOG2E) - lse2
    else:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is right at both ends.
        x = s * scale / CAP
        t = (1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))) * (CAP * LOG2E) - lse2
    if slope is not None:
        t -= slope * LOG2E * tl.abs(row + offset - col).to(tl.float32)
    if BIAS is not None:
        inside = (row < n_i) & (col < n_j)
        added = tl.load(BIAS + row.to(tl.int64) * bias_i + col.to(tl.int64) * bias_j, mask=inside, other=0.0)
        t = tl.maximum(t + added.to(tl.float32) * LOG2E, NEVER, propagate_nan=tl.PropagateNan.ALL)
    if CAREFUL:
        gap = row + offset - col
        # A row past the end is 0, and 0 times what a key holds that no other row sees may be NaN.
        seen = (row < n_i) & (col < n_j) & (gap >= low) & (gap <= high)
        if BITS is not None:
            word = tl.load(BITS + local_row * (J // 32))
            for n in tl.static_range(1, J // 32):
                word = tl.where(local_col >= n * 32, tl.load(BITS + local_row * (J // 32) + n), word)
            seen = seen & (((word >> (local_col % 32)) & 1) != 0)
        t = tl.where(seen, t, NEVER)
    return t


@triton.jit
def band(first, last, low, high, n, J: tl.constexpr):
    """For positions first..last: the tiles of J that hold a visible key, from and to, and those that hold only such.

    A key j is visible where low <= i - j <= high and j < n. Tiles that cross the diagonal are left out of the second
    range from `crossing` on to `crossed`.
    """
    start = tl.maximum(first - high, 0) // J
    stop = tl.maximum(tl.cdiv(tl.maximum(tl.minimum(last - low + 1, n), 0), J), start)
    full_start = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last - high, 0), J), start), stop)
    full_stop = tl.minimum(tl.maximum(tl.minimum(first - low + 1, n), 0) // J, stop)
    full_stop = tl.maximum(full_stop, full_start)
    crossing = tl.minimum(tl.maximum(tl.maximum(first, 0) // J, full_start), full_stop)
    crossed = tl.minimum(tl.maximum((tl.maximum(last, 0) // J + 1), crossing), full_stop)
    return start, stop, full_start, full_stop, crossing, crossed


def _taken(x: Tensor, batch: slice) -> Tensor:
    return x if x.shape[0] == 1 else x[batch]


def strides(tiles: Tensor) -> tuple[int, int, int]:
    """The strides of `b|1 h|1 tiles most`, 0 where one serves for all."""
    b, h, rows, _ = tiles.stride()
    return 0 if tiles.shape[0] == 1 else b, 0 if tiles.shape[1] == 1 else h, rows


def power_of_two(n: int) -> int:
    """The least that is not below n. (Triton's own takes microseconds.)"""
    return 1 << max(0, n - 1).bit_length()


def padded(d: int) -> int:
    """The width a tile of d features takes: a power of two, at least 16."""
    return max(16, power_of_two(d))


def ready(x: Tensor) -> Tensor:
    """The same numbers, features side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pack(seen: Tensor) -> Tensor:
    """Words of 32 bits of a bool tensor along its last dim, a multiple of 32."""
    weight = 2 ** torch.arange(8, device=seen.device, dtype=torch.uint8)
    return (seen.unflatten(-1, (-1, 8)).to(torch.uint8) * weight).sum(-1, dtype=torch.uint8).view(torch.int32)
