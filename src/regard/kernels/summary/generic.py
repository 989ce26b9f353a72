"""Reductions of softmax attention weights that are never stored, in one pass over q and k.

    A_ij = exp(s_ij - lse_i)                             s = q k^T * scale + bias, hidden entries -inf; lse is given
    entropy_i = -sum_j A ln A      max_i = max_j A       distance_i = sum_j A abs(i - j)
    received_j = sum_i A           map_rc = sum of A over the queries of bin r and the keys of bin c; peaks_rc = max
    tops_in = max of A_ij over the keys j of run n, neighbours that a warp holds

One product and one exponential an entry. A program keeps a tile of rows and walks the keys they see, over tiles of
k q^T: in the result of a product a thread holds few of the first axis, keys, and many of the second, queries. What is
asked of rows is summed over the keys a thread holds, kept apart by thread, and put together once, at the end. What is
asked of keys is summed over the rows a thread holds, by parts of the tile, and four threads make a key's sum whole; the
map is made of the same sums. Where bins do not fall into parts, it is a second product: of the tile, and a matrix with
a column for each bin of its rows; in half precision of weights as float16, times 2^14, which keeps small ones precise.
Keys are dealt out so that those of a thread are neighbours, and go to a bin together. Bins may be any groups of queries
and of keys: see `bins`.

Sums over rows leave the program by atomic adds, or, where PyTorch asks for deterministic algorithms, through a buffer
a tile of rows that is added up in a fixed order. Everything else is float32.

Cost: N x N x d multiply-adds on the visible tiles, O(N) memory. Widths up to 256; positions below 2^30.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_cache import launch
from ..tiles import EVERYTHING, LN2, LOG2E, NEVER, NOTHING, Bias, Pattern, band, padded, ready, strides
from .bins import Bins, add_parts
from .generic_tile import fold


@triton.jit
def _reduce(
    Q, K, LSE, LENGTHS, SLOPES, BIAS, ROWS, SLOTS, OWNERS, COL_BINS,
    FULL_COUNTS, FULL, PART_COUNTS, PART, WHERE, BITS,
    ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP, PEAKS, TOPS,
    q_b, q_h, q_i, k_b, k_g, k_j, bias_0, bias_b, bias_h, bias_i, bias_j, full_b, full_h, full_r,
    part_b, part_h, part_r, received_tile, map_rows, map_cols, bin_rows, bin_cols, runs,
    scale, offset, low, high, heads, n_i, n_j, first_tile, tiles,
    d: tl.constexpr,
    KV_GROUP: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    WARPS: tl.constexpr,
    WIDE: tl.constexpr,  # slots for bins of a tile of rows
    PARTS: tl.constexpr,  # of a tile of rows, none with rows of two bins; 0: sums are told apart by slots
    WHOLE: tl.constexpr,  # do the keys a thread holds belong to one bin?
    CAP: tl.constexpr,
    LAST_FIRST: tl.constexpr,  # under a causal mask the last rows take longest
    BACKWARD: tl.constexpr,  # no query sees a key after it, and rows sum to 1
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
    SHIFT: tl.constexpr,  # weights are taken times 2^SHIFT
):  # fmt: skip
    if LAST_FIRST:
        attentions = tl.num_programs(0) // tiles
        place = tiles - 1 - tl.program_id(0) // attentions
        bh = tl.program_id(0) % attentions
    else:
        place = tl.program_id(0) % tiles
        bh = tl.program_id(0) // tiles
    tile = first_tile + place
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    row = tile * I + tl.arange(0, I)
    if ROWS is not None:
        row = tl.load(ROWS + row)
    feature = tl.arange(0, D)
    q = tl.load(
        Q + b * q_b + h * q_h + row.to(tl.int64)[:, None] * q_i + feature[None, :],
        mask=(row < n_i)[:, None] & (feature < d)[None, :],
        other=0.0,
    )
    q = tl.trans(q)
    lse = tl.load(LSE + (b * heads + h) * n_i + row, mask=row < n_i, other=float("-inf"))
    # Rows that see nothing, and rows past the end: as if their sum were beyond measure.
    lse2 = tl.where(lse == float("-inf"), -NEVER, lse * LOG2E - SHIFT)
    length = n_j
    if LENGTHS is not None:
        length = tl.minimum(n_j, tl.load(LENGTHS + b))
    slope = None
    if SLOPES is not None:
        slope = tl.load(SLOPES + h).to(tl.float32)
    first = tl.min(row, 0) + offset
    position = (row + offset - first).to(tl.float32)
    if FULL is not None:
        part_list = b * part_b + h * part_h + tile.to(tl.int64) * part_r
        full_list = FULL + b * full_b + h * full_h + tile.to(tl.int64) * full_r
        plain = tl.load(FULL_COUNTS + (b * full_b + h * full_h) // full_r + tile)
        careful = tl.load(PART_COUNTS + (b * part_b + h * part_h) // part_r + tile)
        before = plain
        start, full_start, crossing, crossed, full_stop = 0, 0, 0, 0, 0
    else:
        last = tl.max(tl.where(row < n_i, row, 0), 0) + offset
        start, stop, full_start, full_stop, crossing, crossed = band(first, last, low, high, length, J)
        before = crossing - full_start
        plain = before + full_stop - crossed
        careful = stop - start - plain
    threads: tl.constexpr = 8 * min(WARPS, J // 16)
    entropy = tl.zeros((threads, I), tl.float32)
    largest = tl.zeros((threads, I), tl.int32)
    distance = tl.zeros((threads, I), tl.float32)
    K += b * k_b + (h // KV_GROUP) * k_g
    if BIAS is not None:
        BIAS += bias_0 + b * bias_b + h * bias_h
    if RECEIVED is not None:
        RECEIVED += (b * heads + h) * n_j + place.to(tl.int64) * received_tile
    slots, cells, at, peaks, tops = None, None, None, None, None
    if PARTS == 0:
        slot = tl.load(SLOTS + tile * I + tl.arange(0, I))
        slots = tl.where(slot[:, None] == tl.arange(0, WIDE)[None, :], 2.0**-SHIFT, 0.0)
        if SHIFT:
            slots = slots.to(tl.float16)
    if MAP is not None or PEAKS is not None:
        # The row of the map that each part of the rows, or each slot, adds to; -1: none.
        if PARTS:
            leader = tl.load(SLOTS + tile * I + tl.arange(0, PARTS) * (I // PARTS))
            bin = tl.load(OWNERS + tile * WIDE + leader, mask=leader >= 0, other=-1)
        else:
            bin = tl.load(OWNERS + tile * WIDE + tl.arange(0, WIDE))
        if PEAKS is not None:
            peaks = PEAKS + (b * heads + h) * bin_rows * bin_cols + tl.maximum(bin, 0).to(tl.int64) * bin_cols
        if MAP is not None:
            cells = MAP + (b * heads + h) * map_rows * map_cols
            at = bin * map_cols
            if DETERMINISTIC:
                apart: tl.constexpr = PARTS if PARTS else WIDE
                cells += place.to(tl.int64) * apart * map_cols
                at = tl.arange(0, apart) * map_cols
    if TOPS is not None:
        tops = TOPS + (((b * heads + h) * tiles + place) * I + tl.arange(0, I)) * runs
    for n in range(plain):
        if FULL is not None:
            col_tile = tl.load(full_list + n)
        else:
            col_tile = tl.where(n < before, full_start + n, crossed + n - before)
        entropy, largest, distance = fold(
            q, K, lse2, entropy, largest, distance, row, position, first, col_tile, k_j, offset, scale, slope,
            BIAS, bias_i, bias_j, n_i, length, n_j, low, high, None, ENTROPY, RECEIVED, LARGEST, DISTANCE, slots, cells,
            at, peaks, tops, COL_BINS, d, I, J, D, WARPS, PARTS, WHOLE, CAP, BACKWARD, False, DETERMINISTIC,
            PRECISION,
        )  # fmt: skip
    # Few tiles: a pipeline of loads would cost the loop above registers.
    for n in tl.range(careful, num_stages=1):
        if FULL is not None:
            col_tile = tl.load(PART + part_list + n)
            bits = BITS + tl.load(WHERE + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            middle = ahead + crossed - crossing
            col_tile = tl.where(
                n < ahead, start + n, tl.where(n < middle, crossing + n - ahead, full_stop + n - middle)
            )
            bits = None
        entropy, largest, distance = fold(
            q, K, lse2, entropy, largest, distance, row, position, first, col_tile, k_j, offset, scale, slope,
            BIAS, bias_i, bias_j, n_i, length, n_j, low, high, bits, ENTROPY, RECEIVED, LARGEST, DISTANCE, slots, cells,
            at, peaks, tops, COL_BINS, d, I, J, D, WARPS, PARTS, WHOLE, CAP, BACKWARD, True, DETERMINISTIC,
            PRECISION,
        )  # fmt: skip
    out = (b * heads + h) * n_i + row
    back: tl.constexpr = 2.0**-SHIFT
    if ENTROPY is not None:
        # log2 A was SHIFT too large; where it is shifted, rows sum to 1, or see nothing.
        taken = tl.where(lse == float("-inf"), 0, SHIFT)
        tl.store(ENTROPY + out, (tl.sum(entropy, 0) * back - taken) * -LN2, mask=row < n_i)
    if LARGEST is not None:
        tl.store(LARGEST + out, tl.max(largest, 0).to(tl.float32, bitcast=True) * back, mask=row < n_i)
    if DISTANCE is not None:
        total = tl.sum(distance, 0) * back
        if BACKWARD:
            # sum of A (i - j) = sum of A (first - j) + (i - first) sum of A, and that sum is 1, or 0 in an empty row
            total += tl.where(lse == float("-inf"), 0.0, position)
        tl.store(DISTANCE + out, total, mask=row < n_i)


class Reduced(NamedTuple):
    """What was asked for, in float32; None what was not."""

    entropy: Tensor | None = None  # b h i
    received: Tensor | None = None  # b h j
    max: Tensor | None = None  # b h i
    distance: Tensor | None = None  # b h i
    map: Tensor | None = None  # b h rows cols, sums
    peaks: Tensor | None = None  # b h rows cols, the largest


class Config(NamedTuple):
    """How a launch is cut: rows and keys of a tile, warps, tiles of keys under way, most registers a thread."""

    rows: int
    cols: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def threads(self) -> int:
        """Threads that share the keys of a row."""
        return 8 * min(self.warps, self.cols // 16)

    @property
    def sides(self) -> int:
        """Warps that share the keys of a tile, each with rows of its own."""
        return max(1, self.warps * 16 // self.cols)

    @property
    def run(self) -> int:
        """Neighbouring keys that a warp holds."""
        return self.cols * 8 // self.threads


SHIFT = 14  # so that weights from 2^-28 to 1 are normal numbers of float16, and the way back is one too
PARTIAL = 2**25  # numbers a deterministic sum over rows may keep before they are added up


def config(d: int, dtype: torch.dtype) -> Config:
    """The fastest cut measured for a width."""
    return Config(32, 64, 4, 2) if dtype == torch.float32 or d > 128 else Config(64, 64, 4, 3, 168)


def reduce(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    want: frozenset[str],
    scale: float,
    offset: int,
    cut: Config,
    cap: float | None = None,
    pattern: Pattern = EVERYTHING,
    bias: Bias = NOTHING,
    bins: Bins | None = None,
    sums_to_one: bool = False,
) -> Reduced:
    """Any of "entropy", "received", "max", "distance", and of bins "map", "peaks": `b h i d, b g j d, b h i -> ...`.

    Lists in `pattern` are cut as `cut` says, over rows as `bins` deals them out. `sums_to_one` promises that every row
    that sees a key does; distances under a causal mask are then had for less.
    """
    work = Work(ready(q), ready(k), lse.contiguous(), scale, offset, cap, pattern, bias, bins, cut, sums_to_one)
    b, h, n_i, _ = q.shape
    n_j = k.shape[2]
    shapes: dict[str, tuple[int, ...]] = {"entropy": (n_i,), "received": (n_j,), "max": (n_i,), "distance": (n_i,)}
    if bins is not None:
        shapes |= {"map": bins.shape, "peaks": bins.shape}
    # Every row is written; keys and bins are added to.
    rows = ("entropy", "max", "distance") if n_j else ()
    make = {name: torch.empty if name in rows else torch.zeros for name in want}
    out = Reduced(**{name: make[name](b, h, *shapes[name], device=q.device, dtype=torch.float32) for name in want})
    if not (b and n_i and n_j):
        return out
    if not torch.are_deterministic_algorithms_enabled():
        work(out, 0, work.tiles)
        return out
    per_tile = b * h * n_j * (1 if out.map is None else work.apart)
    for first, count in strips(work.tiles, max(1, PARTIAL // per_tile)):
        received = None if out.received is None else q.new_zeros(count, b, h, n_j, dtype=torch.float32)
        sums = None if out.map is None else q.new_zeros(b, h, count * work.apart, n_j, dtype=torch.float32)
        work(out._replace(received=received, map=sums), first, count)
        if out.received is not None and received is not None:
            out.received.add_(received.sum(0))
        if bins is not None and out.map is not None and sums is not None:
            add_parts(out.map, sums, bins, first, count)
    return out


def run_maxima(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    offset: int,
    cut: Config,
    cap: float | None = None,
    pattern: Pattern = EVERYTHING,
    bias: Bias = NOTHING,
    strip: int,
) -> Iterator[tuple[slice, Tensor]]:
    """About `strip` rows at a time, those and their largest weight in each run of `cut.run` keys: `b h rows runs`."""
    work = Work(ready(q), ready(k), lse.contiguous(), scale, offset, cap, pattern, bias, None, cut, False)
    b, h, n_i, _ = q.shape
    runs = -(-k.shape[2] // cut.run)
    for first, count in strips(work.tiles, max(1, strip // cut.rows)):
        tops = torch.zeros(b, h, count * cut.rows, runs, device=q.device, dtype=torch.float32)
        if tops.numel():
            work(Reduced(), first, count, tops)
        rows = slice(first * cut.rows, min((first + count) * cut.rows, n_i))
        yield rows, tops[:, :, : rows.stop - rows.start]


def strips(tiles: int, step: int) -> Iterator[tuple[int, int]]:
    """The first tile of each strip, and how many it has."""
    for first in range(0, tiles, step):
        yield first, min(step, tiles - first)


class Work(NamedTuple):
    """Everything about a reduction but where its results go."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    offset: int
    cap: float | None
    pattern: Pattern
    bias: Bias
    bins: Bins | None
    cut: Config
    sums_to_one: bool

    @property
    def parts(self) -> int:
        """Of a tile of rows; 0 where its bins have slots."""
        return self.cut.sides if self.bins is None else self.bins.parts

    @property
    def wide(self) -> int:
        """Slots of a tile of rows."""
        return 0 if self.bins is None else self.bins.owners.shape[1]

    @property
    def apart(self) -> int:
        """Sums over rows of a tile that are kept apart."""
        return self.parts or self.wide

    @property
    def dealt(self) -> Tensor | None:
        """The rows in the order they are dealt out."""
        return None if self.bins is None else self.bins.dealt

    @property
    def tiles(self) -> int:
        """Of rows."""
        return -(-(self.q.shape[2] if self.dealt is None else self.dealt.numel()) // self.cut.rows)

    def __call__(self, out: Reduced, first: int, count: int, tops: Tensor | None = None) -> None:
        """Reduce `count` tiles of rows."""
        q, k, cut, bins, lists = self.q, self.k, self.cut, self.bins, self.pattern.lists
        b, h, n_i, d = q.shape
        g, n_j = k.shape[1:3]
        values = self.bias.values
        steps: tuple[int, ...] = self.bias.steps or (0, 0, 0, 0)
        if values is not None and self.bias.steps is None:
            values = values.expand(b, h, n_i, n_j)
            steps = values.stride()
        deterministic = torch.are_deterministic_algorithms_enabled()
        launch(
            _reduce, (count * b * h,),
            q, k, self.lse, self.pattern.lengths, self.bias.slopes, values, self.dealt,
            *((None,) * 3 if bins is None else (bins.slots, bins.owners, bins.cols)),
            *((None,) * 6 if lists is None else lists),
            out.entropy, out.received, out.max, out.distance, out.map,
            None if out.peaks is None else out.peaks.view(torch.int32), tops,
            *q.stride()[:3], *k.stride()[:3], self.bias.origin, *steps,
            *((0,) * 6 if lists is None else (*strides(lists.full), *strides(lists.part))),
            b * h * n_j if deterministic else 0,
            *((0, 0) if out.map is None else out.map.shape[2:]), *((0, 0) if bins is None else bins.shape),
            0 if tops is None else tops.shape[3],
            self.scale, self.offset, self.pattern.low, self.pattern.high, h, n_i, n_j, first, count,
            d=d,
            KV_GROUP=h // g,
            I=cut.rows,
            J=cut.cols,
            D=padded(d),
            WARPS=cut.warps,
            WIDE=self.wide,
            PARTS=self.parts,
            WHOLE=bins is None or bins.whole,
            CAP=self.cap,
            LAST_FIRST=self.pattern.low > -n_j,
            BACKWARD=self.sums_to_one and self.pattern.low >= 0,
            DETERMINISTIC=deterministic,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            SHIFT=0 if self.parts or not self.sums_to_one or q.dtype == torch.float32 else SHIFT,
            num_warps=cut.warps,
            num_stages=cut.stages,
            maxnreg=cut.registers,
        )  # fmt: skip
