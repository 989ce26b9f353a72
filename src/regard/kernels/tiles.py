"""Shared by the kernels: log2 A of one tile, the tiles of the matrix to visit, and the sizes of tiles.

    log2 A_ij = (q_i . k_j * scale + bias_ij - lse_i) / ln 2,    -inf where the mask hides j from i.

A mask comes as a `Pattern`: a band of diagonals and a length per batch row, which the kernel turns into tile ranges
itself, or lists of tiles (fully visible, and partly visible with one bit per entry).

The kernels visit two kinds of tiles in separate loops. Plain tiles, most of them, are fully visible. Careful tiles are
partly hidden, ragged, or cross the diagonal, where distances change sign; their entries are masked one by one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UNBOUNDED = 2**30  # larger than any distance between two positions
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2_ZERO: tl.constexpr = tl.constexpr(-1e30)  # instead of -inf: 2**LOG2_ZERO is 0, and 0 * LOG2_ZERO is 0, not NaN


class TileConfig(NamedTuple):
    """How a summary kernel is launched: rows and keys per tile, warps, pipeline stages, registers per thread."""

    rows: int
    cols: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def threads(self) -> int:
        """The number of threads that share the keys of a row."""
        return 8 * min(self.warps, self.cols // 16)

    @property
    def sides(self) -> int:
        """The number of warps that share the keys of a tile, each with rows of its own."""
        return max(1, self.warps * 16 // self.cols)

    @property
    def run(self) -> int:
        """The number of neighbouring keys that a warp holds."""
        return self.cols * 8 // self.threads


class TileLists(NamedTuple):
    """For each tile of rows (of keys, if a kernel loops over rows): the tiles to visit along the other axis.

    Tiles not listed are empty. Counts are `b|1 h|1 tiles`; `full`, `part` and `bits_index` are `b|1 h|1 tiles n`, of
    which the first `count` entries are read. `Pattern` shows how the lists spell out a mask.
    """

    full_counts: Tensor
    full: Tensor  # tiles with every entry visible
    part_counts: Tensor
    part: Tensor  # tiles with some entries visible
    bits_index: Tensor  # for each tile of `part`, its index in `bits`
    bits: Tensor  # n rows cols/32, int32: bit c % 32 of word c // 32 is column c


class Pattern(NamedTuple):
    """Which keys each query sees, as the kernels read it: a band of diagonals and lengths, or lists of tiles.

    *Basics.* Without lists, the query at position i sees the key at j of batch row b if

        low <= i - j <= high and j < lengths[b]

    *Details.* A pattern with lists has neither a band nor lengths. With tiles of I rows and J keys, by rows, it stands
    for this dense mask:

        seen = zeros(b, h, n_i, n_j, dtype=bool)
        for r in range(ceil(n_i / I)):
            rows = slice(r * I, (r + 1) * I)
            for n in range(full_counts[b, h, r]):
                seen[b, h, rows, full[b, h, r, n] * J : (full[b, h, r, n] + 1) * J] = True
            for n in range(part_counts[b, h, r]):
                tile = bits[bits_index[b, h, r, n]]                                       # I J/32
                tile = (tile[:, :, None] >> arange(32) & 1).flatten(-2)                   # I J
                seen[b, h, rows, part[b, h, r, n] * J : (part[b, h, r, n] + 1) * J] = tile
    """

    low: int = -UNBOUNDED
    high: int = UNBOUNDED
    lengths: Tensor | None = None
    lists: TileLists | None = None

    def for_batch(self, batch: slice) -> Pattern:
        """Return the pattern of the given batch rows."""
        lengths = None if self.lengths is None else _slice_batch(self.lengths, batch)
        if self.lists is None:
            return self._replace(lengths=lengths)
        *tiles, bits = self.lists
        return self._replace(lengths=lengths, lists=TileLists._make([*(_slice_batch(x, batch) for x in tiles), bits]))


class KernelBias(NamedTuple):
    """Numbers added to the scores: -slopes[h] * abs(i - j), or values.

    Values broadcast over b h i j. If `steps` are given, the value of (b, h, i, j) is the element of `values` at
    `origin + b * steps[0] + h * steps[1] + i * steps[2] + j * steps[3]`.
    """

    slopes: Tensor | None = None
    values: Tensor | None = None
    origin: int = 0
    steps: tuple[int, int, int, int] | None = None

    def for_batch(self, batch: slice) -> KernelBias:
        """Return the bias of the given batch rows."""
        if self.values is None or self.steps is not None:
            return self
        return self._replace(values=_slice_batch(self.values, batch))


ALL_VISIBLE = Pattern()
NO_BIAS = KernelBias()


class KeyStream(NamedTuple):
    """Inside a kernel: the keys of one head, and which of them a row sees."""

    K: Any
    k_j: Any
    length: Any  # keys of this batch row
    n_j: Any
    low: Any
    high: Any


class RowStream(NamedTuple):
    """Inside a kernel: the queries of one head and their log-sum-exp."""

    Q: Any
    q_i: Any
    LSE: Any
    n_i: Any


class ScoreTerms(NamedTuple):
    """Inside a kernel: the terms that turn products of queries and keys into scores; None for absent ones."""

    offset: Any
    scale: Any
    slope: Any
    BIAS: Any
    bias_i: Any
    bias_j: Any


@triton.jit
def log2_weights(
    s,  # [I, J] or [J, I], products of queries and keys
    lse2,  # log2 of each query's sum of exponentials, broadcastable
    row,  # query rows, broadcastable
    col,  # keys, broadcastable
    offset,
    scale,
    slope,
    BIAS,  # pointer to the values of this batch row and head
    bias_i,
    bias_j,
    n_i,
    n_j,
    low,
    high,
    BITS,  # pointer to the bits of this tile, rows of J / 32 words
    local_row,
    local_col,
    J: tl.constexpr,
    CAP: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """log2 A of one tile; LOG2_ZERO at hidden entries and past the end."""
    if CAP is None:
        t = s * (scale * LOG2E) - lse2
    else:
        # tanh(x) = 1 - 2 / (1 + e^2x) needs no branch: it is right as x goes to inf and to -inf.
        x = s * scale / CAP
        t = (1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))) * (CAP * LOG2E) - lse2
    if slope is not None:
        t -= slope * LOG2E * tl.abs(row + offset - col).to(tl.float32)
    if BIAS is not None:
        inside = (row < n_i) & (col < n_j)
        added = tl.load(BIAS + row.to(tl.int64) * bias_i + col.to(tl.int64) * bias_j, mask=inside, other=0.0)
        t = tl.maximum(t + added.to(tl.float32) * LOG2E, LOG2_ZERO, propagate_nan=tl.PropagateNan.ALL)
    if CAREFUL:
        gap = row + offset - col
        # Rows past the end are hidden too: they load as 0, and 0 times a NaN in a key that no real row sees is NaN.
        seen = (row < n_i) & (col < n_j) & (gap >= low) & (gap <= high)
        if BITS is not None:
            word = tl.load(BITS + local_row * (J // 32))
            for n in tl.static_range(1, J // 32):
                word = tl.where(local_col >= n * 32, tl.load(BITS + local_row * (J // 32) + n), word)
            seen = seen & (((word >> (local_col % 32)) & 1) != 0)
        t = tl.where(seen, t, LOG2_ZERO)
    return t


@triton.jit
def visible_tiles(first, last, low, high, n, J: tl.constexpr):
    """Return the ranges of key tiles that query positions first..last see.

    A key j is visible if low <= i - j <= high and j < n. Tiles start..stop hold a visible key; tiles
    full_start..full_stop hold only visible keys. Within the second range, tiles crossing..crossed cross the diagonal.
    """
    start = tl.maximum(first - high, 0) // J
    stop = tl.maximum(tl.cdiv(tl.maximum(tl.minimum(last - low + 1, n), 0), J), start)
    full_start = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last - high, 0), J), start), stop)
    full_stop = tl.minimum(tl.maximum(tl.minimum(first - low + 1, n), 0) // J, stop)
    full_stop = tl.maximum(full_stop, full_start)
    crossing = tl.minimum(tl.maximum(tl.maximum(first, 0) // J, full_start), full_stop)
    crossed = tl.minimum(tl.maximum((tl.maximum(last, 0) // J + 1), crossing), full_stop)
    return start, stop, full_start, full_stop, crossing, crossed


def _slice_batch(x: Tensor, batch: slice) -> Tensor:
    return x if x.shape[0] == 1 else x[batch]


def list_strides(tiles: Tensor) -> tuple[int, int, int]:
    """Return the strides of `b|1 h|1 tiles n`, 0 for a dim of size 1, which broadcasts."""
    b, h, rows, _ = tiles.stride()
    return 0 if tiles.shape[0] == 1 else b, 0 if tiles.shape[1] == 1 else h, rows


@lru_cache(maxsize=16)
def all_lengths(b: int, n: int, device: torch.device) -> Tensor:
    """Return the lengths of b texts without padding: kernels take them rather than be compiled without lengths."""
    with torch.inference_mode(False):
        return torch.full((b,), n, dtype=torch.int32, device=device)


def dot_precision(dtype: torch.dtype) -> str:
    """Return how a kernel multiplies tiles of this dtype: float32 in three products of TF32, or in one if allowed.

    PyTorch's setting allows it: `torch.backends.cuda.matmul.fp32_precision`. Half precision has one product anyway.
    """
    return "tf32x3" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32" else "tf32"


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n (triton.next_power_of_2 takes microseconds)."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache(maxsize=64)
def padded_width(d: int) -> int:
    """Return the width of a tile that holds d features: a power of two, at least 16."""
    return max(16, next_power_of_two(d))


def with_contiguous_features(x: Tensor) -> Tensor:
    """Return x, copied if its last dim is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pack_bits(seen: Tensor) -> Tensor:
    """Pack a bool tensor into int32 words along its last dim, whose size is a multiple of 32."""
    weight = 2 ** torch.arange(8, device=seen.device, dtype=torch.uint8)
    return (seen.unflatten(-1, (-1, 8)).to(torch.uint8) * weight).sum(-1, dtype=torch.uint8).view(torch.int32)
