"""Measures of softmax attention weights that are never stored, in one pass over q and k: entropy, received mass, ...

    A_ij = exp(s_ij - lse_i)                             s = q k^T * scale + bias, hidden entries -inf; lse is given
    entropy_i = -sum_j A ln A      max_i = max_j A       distance_i = sum_j A abs(i - j)
    received_j = sum_i A           map_rc = sum of A over the queries of bin r and the keys of bin c; peaks_rc = max
    tops_in = max of A_ij over the keys j of run n, neighbours that a warp holds

Each entry costs one product and one exponential. A program keeps a tile of rows and loops over the keys they see, as
tiles of k q^T: in the result of a product each thread holds few entries of the first axis, keys, and many of the
second, queries.

- Measures per row are summed over the keys a thread holds, separately per thread, and combined once at the end.
- Measures per key are summed over the rows a thread holds, by parts of the tile; four threads complete a key's sum.
- The map is made of the same sums. If bins do not fall into parts of a tile (see `bins`), it is a second product: of
  the tile and a matrix with a column for each bin of its rows. In half precision the weights are float16 times 2^14,
  which keeps small ones precise.
- Keys are ordered so that those of a thread are neighbours, and mostly go to a bin together.

Sums over rows leave the program by atomic adds or, if PyTorch asks for deterministic algorithms, through one buffer per
tile of rows; the buffers are added up in a fixed order. Everything else is float32.

Cost: N x N x d multiply-adds on the visible tiles, O(N) memory. Limits: widths up to 256, positions below 2^30.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_cache import launch
from ..tiles import (
    ALL_VISIBLE,
    LN2,
    LOG2_ZERO,
    LOG2E,
    NO_BIAS,
    KernelBias,
    KeyStream,
    Pattern,
    ScoreTerms,
    TileConfig,
    all_lengths,
    dot_precision,
    list_strides,
    padded_width,
    visible_tiles,
    with_contiguous_features,
)
from .bins import Bins, add_parts
from .generic_tile import RowTile, TileOutputs, add_tile

HALF_SHIFT = 14  # makes weights from 2^-28 to 1 normal numbers of float16, and 2^-14 is one too
MAX_SHORT_ENTRIES = 2**22  # queries times keys of an attention that takes less time than a compilation saves
MAX_PARTIAL_SUMS = 2**25  # numbers in the buffers of a deterministic sum over rows


# Numbers that change with the length, the width, the mask or the map: a kernel is not compiled again for those that are
# 1 or multiples of 16.
LENGTHS_AND_SIZES = [
    *("full_b", "full_h", "full_r", "part_b", "part_h", "part_r", "received_tile", "map_rows", "map_cols", "bin_rows"),
    *("bin_cols", "runs", "offset", "low", "high", "heads", "kv_group", "n_i", "n_j", "d", "first_tile", "tiles"),
    "last_first",
]


@triton.jit(do_not_specialize=LENGTHS_AND_SIZES)
def _summary_kernel(
    Q, K, LSE, LENGTHS, SLOPES, BIAS, ROW_ORDER, SLOTS, OWNERS, COL_BINS,
    FULL_COUNTS, FULL, PART_COUNTS, PART, BITS_INDEX, BITS,
    ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP, PEAKS, TOPS,
    q_b, q_h, q_i, k_b, k_g, k_j, bias_0, bias_b, bias_h, bias_i, bias_j, full_b, full_h, full_r,
    part_b, part_h, part_r, received_tile, map_rows, map_cols, bin_rows, bin_cols, runs,
    scale, offset, low, high, heads, kv_group, n_i, n_j, d, first_tile, tiles,
    last_first,  # 1 to launch the last rows first, which take longest under a causal mask, else 0
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,  # a divisor of d: STEP neighbouring features are loaded together; D if d is D
    WARPS: tl.constexpr,
    WIDE: tl.constexpr,  # slots for the bins of a tile of rows
    PARTS: tl.constexpr,  # parts of a tile of rows, each within one bin; 0 if bins have slots instead
    WHOLE: tl.constexpr,  # whether the keys a thread holds always belong to one bin
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,  # no query sees a key after it, and rows sum to 1
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
    SHIFT: tl.constexpr,  # weights are computed times 2^SHIFT
):  # fmt: skip
    attentions = tl.num_programs(0) // tiles
    program = tl.program_id(0)
    place = tl.where(last_first > 0, tiles - 1 - program // attentions, program % tiles)
    bh = tl.where(last_first > 0, program % attentions, program // tiles)
    tile = first_tile + place
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    row = tile * I + tl.arange(0, I)
    if ROW_ORDER is not None:
        row = tl.load(ROW_ORDER + row)
    feature = tl.arange(0, D)
    q = tl.load(
        Q + b * q_b + h * q_h + row.to(tl.int64)[:, None] * q_i + feature[None, :],
        mask=(row < n_i)[:, None] & (feature // STEP < d // STEP)[None, :],
        other=0.0,
    )
    q = tl.trans(q)
    lse = tl.load(LSE + (b * heads + h) * n_i + row, mask=row < n_i, other=float("-inf"))
    # Rows that see nothing, and rows past the end, get an infinite sum, so that their weights are 0.
    lse2 = tl.where(lse == float("-inf"), -LOG2_ZERO, lse * LOG2E - SHIFT)
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
        start, stop, full_start, full_stop, crossing, crossed = visible_tiles(first, last, low, high, length, J)
        before = crossing - full_start
        plain = before + full_stop - crossed
        careful = stop - start - plain
    threads: tl.constexpr = 8 * min(WARPS, J // 16)
    entropy = tl.zeros((threads, I), tl.float32)
    largest = tl.zeros((threads, I), tl.int32)
    distance = tl.zeros((threads, I), tl.float32)
    K += b * k_b + (h // kv_group) * k_g
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
        # The map row that each part of the rows, or each slot, adds to; -1 if none.
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
    rows = RowTile(q, lse2, row, position, first)
    keys = KeyStream(K, k_j, length, n_j, low, high)
    terms = ScoreTerms(offset, scale, slope, BIAS, bias_i, bias_j)
    out = TileOutputs(ENTROPY, RECEIVED, LARGEST, DISTANCE, slots, cells, at, peaks, tops, COL_BINS)
    for n in range(plain):
        if FULL is not None:
            col_tile = tl.load(full_list + n)
        else:
            col_tile = tl.where(n < before, full_start + n, crossed + n - before)
        entropy, largest, distance = add_tile(
            entropy, largest, distance, rows, keys, terms, out, n_i, col_tile, None,
            d, I, J, D, STEP, WARPS, PARTS, WHOLE, CAP, CAUSAL, DETERMINISTIC, PRECISION, False,
        )  # fmt: skip
    # There are few careful tiles, and a pipeline of loads here would cost the loop above registers.
    for n in tl.range(careful, num_stages=1):
        if FULL is not None:
            col_tile = tl.load(PART + part_list + n)
            bits = BITS + tl.load(BITS_INDEX + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            middle = ahead + crossed - crossing
            col_tile = tl.where(
                n < ahead, start + n, tl.where(n < middle, crossing + n - ahead, full_stop + n - middle)
            )
            bits = None
        entropy, largest, distance = add_tile(
            entropy, largest, distance, rows, keys, terms, out, n_i, col_tile, bits,
            d, I, J, D, STEP, WARPS, PARTS, WHOLE, CAP, CAUSAL, DETERMINISTIC, PRECISION, True,
        )  # fmt: skip
    row_index = (b * heads + h) * n_i + row
    back: tl.constexpr = 2.0**-SHIFT
    if ENTROPY is not None:
        # log2 A is SHIFT too large. Weights are shifted only if rows sum to 1, or see nothing.
        excess = tl.where(lse == float("-inf"), 0, SHIFT)
        tl.store(ENTROPY + row_index, (tl.sum(entropy, 0) * back - excess) * -LN2, mask=row < n_i)
    if LARGEST is not None:
        tl.store(LARGEST + row_index, tl.max(largest, 0).to(tl.float32, bitcast=True) * back, mask=row < n_i)
    if DISTANCE is not None:
        total = tl.sum(distance, 0) * back
        if CAUSAL:
            # sum_j A (i - j) = sum_j A (first - j) + (i - first) sum_j A, and sum_j A is 1, or 0 in an empty row
            total += tl.where(lse == float("-inf"), 0.0, position)
        tl.store(DISTANCE + row_index, total, mask=row < n_i)


class SummaryTensors(NamedTuple):
    """The requested measures in float32; None for the others."""

    entropy: Tensor | None = None  # b h i
    received: Tensor | None = None  # b h j
    max: Tensor | None = None  # b h i
    distance: Tensor | None = None  # b h i
    map: Tensor | None = None  # b h rows cols, the sum of each bin
    peaks: Tensor | None = None  # b h rows cols, the maximum of each bin


class SummaryLauncher(NamedTuple):
    """Every input of the kernel; calling it reduces some tiles of rows into the given outputs."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    offset: int
    cap: float | None
    pattern: Pattern
    bias: KernelBias
    bins: Bins | None
    config: TileConfig
    sums_to_one: bool

    @property
    def parts(self) -> int:
        """The number of parts of a tile of rows; 0 if its bins have slots."""
        return self.config.sides if self.bins is None else self.bins.parts

    @property
    def slots(self) -> int:
        """The number of slots of a tile of rows."""
        return 0 if self.bins is None else self.bins.owners.shape[1]

    @property
    def sums_per_key(self) -> int:
        """The number of sums over rows that a tile keeps for each key."""
        return self.parts or self.slots

    @property
    def row_order(self) -> Tensor | None:
        """The rows in the order they fill the tiles; None for 0, 1, 2, ..."""
        return None if self.bins is None else self.bins.row_order

    @property
    def tiles(self) -> int:
        """The number of tiles of rows."""
        return -(-(self.q.shape[2] if self.row_order is None else self.row_order.numel()) // self.config.rows)

    def __call__(self, out: SummaryTensors, first: int, count: int, tops: Tensor | None = None) -> None:
        """Launch the kernel for `count` tiles of rows from tile `first` on."""
        q, k, config, bins, lists = self.q, self.k, self.config, self.bins, self.pattern.lists
        b, h, n_i, d = q.shape
        g, n_j = k.shape[1:3]
        lengths, values = self.pattern.lengths, self.bias.values
        lengths = all_lengths(b, n_j, q.device) if lengths is None else lengths
        steps: tuple[int, ...] = self.bias.steps or (0, 0, 0, 0)
        if values is not None and self.bias.steps is None:
            values = values.expand(b, h, n_i, n_j)
            steps = values.stride()
        deterministic = torch.are_deterministic_algorithms_enabled()
        # A short call takes a kernel that others have compiled: of a width up to that of its tile, causal or not.
        is_short = n_i * n_j <= MAX_SHORT_ENTRIES
        launch(
            _summary_kernel, (count * b * h,),
            q, k, self.lse, lengths, self.bias.slopes, values, self.row_order,
            *((None,) * 3 if bins is None else (bins.slots, bins.owners, bins.cols)),
            *((None,) * 6 if lists is None else lists),
            out.entropy, out.received, out.max, out.distance, out.map,
            None if out.peaks is None else out.peaks.view(torch.int32), tops,
            *q.stride()[:3], *k.stride()[:3], self.bias.origin, *steps,
            *((0,) * 6 if lists is None else (*list_strides(lists.full), *list_strides(lists.part))),
            b * h * n_j if deterministic else 0,
            *((0, 0) if out.map is None else out.map.shape[2:]), *((0, 0) if bins is None else bins.shape),
            0 if tops is None else tops.shape[3],
            self.scale, self.offset, self.pattern.low, self.pattern.high, h, h // g, n_i, n_j, d, first, count,
            int(self.pattern.low > -n_j),
            I=config.rows,
            J=config.cols,
            D=padded_width(d),
            STEP=8 if is_short and d > 64 and d % 8 == 0 else feature_step(d),
            WARPS=config.warps,
            WIDE=self.slots,
            PARTS=self.parts,
            WHOLE=self.parts > 0 and (bins is None or bins.whole),
            CAP=self.cap,
            CAUSAL=self.sums_to_one and self.pattern.low >= 0 and not is_short,
            DETERMINISTIC=deterministic,
            PRECISION=dot_precision(q.dtype),
            SHIFT=0 if self.parts or not self.sums_to_one or q.dtype == torch.float32 else HALF_SHIFT,
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.registers,
        )  # fmt: skip


def feature_step(d: int) -> int:
    """Return the number of features that are loaded at once: all if they fill a tile, else 8, or 1 by 1."""
    return d if padded_width(d) == d else 8 if d % 8 == 0 else 1


def tile_config(d: int, dtype: torch.dtype) -> TileConfig:
    """Return the fastest measured config for heads of width d (on an H200; float32 at 16k causal keys of width 128).

    In three products 64 rows took 9.2 ms with loads that are not pipelined, which leaves registers for the parts of the
    operands; 32 rows 12.3 ms, eight warps 16.6 ms. In one product, pipelined, 64 rows took 4.0 ms and 32 rows 7.1 ms.
    """
    if d > 128:
        return TileConfig(32, 64, 4, 2)
    if dtype == torch.float32:
        return TileConfig(64, 64, 4, 1 if dot_precision(dtype) == "tf32x3" else 2)
    return TileConfig(64, 64, 4, 3, 168)


def summarize_generic(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    want: frozenset[str],
    scale: float,
    offset: int,
    config: TileConfig,
    cap: float | None = None,
    pattern: Pattern = ALL_VISIBLE,
    bias: KernelBias = NO_BIAS,
    bins: Bins | None = None,
    sums_to_one: bool = False,
) -> SummaryTensors:
    """Return any of "entropy", "received", "max", "distance", and with bins "map", "peaks".

    Inputs are `b h i d, b g j d, b h i`. Lists in `pattern` must be cut by `config`, over rows in the order of `bins`.
    `sums_to_one` promises that the weights of every row that sees a key sum to 1, which makes distances under a causal
    mask cheaper.
    """
    q, k = with_contiguous_features(q), with_contiguous_features(k)
    run = SummaryLauncher(q, k, lse.contiguous(), scale, offset, cap, pattern, bias, bins, config, sums_to_one)
    b, h, n_i, _ = q.shape
    n_j = k.shape[2]
    shapes: dict[str, tuple[int, ...]] = {"entropy": (n_i,), "received": (n_j,), "max": (n_i,), "distance": (n_i,)}
    if bins is not None:
        shapes |= {"map": bins.shape, "peaks": bins.shape}
    # The kernel writes every row; it adds to keys and bins, so those start at 0.
    written = ("entropy", "max", "distance") if n_j else ()
    make = {name: torch.empty if name in written else torch.zeros for name in want}
    out = SummaryTensors(
        **{name: make[name](b, h, *shapes[name], device=q.device, dtype=torch.float32) for name in want}
    )
    if not (b and n_i and n_j):
        return out
    if not torch.are_deterministic_algorithms_enabled():
        run(out, 0, run.tiles)
        return out
    sums_per_tile = b * h * n_j * (1 if out.map is None else run.sums_per_key)
    for first, count in tile_ranges(run.tiles, max(1, MAX_PARTIAL_SUMS // sums_per_tile)):
        received = None if out.received is None else q.new_zeros(count, b, h, n_j, dtype=torch.float32)
        sums = None if out.map is None else q.new_zeros(b, h, count * run.sums_per_key, n_j, dtype=torch.float32)
        run(out._replace(received=received, map=sums), first, count)
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
    config: TileConfig,
    cap: float | None = None,
    pattern: Pattern = ALL_VISIBLE,
    bias: KernelBias = NO_BIAS,
    rows_per_strip: int,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield strips of about `rows_per_strip` rows with the largest weight in each run of `config.run` keys.

    Each item is a slice of rows and their maxima `b h rows runs`.
    """
    q, k = with_contiguous_features(q), with_contiguous_features(k)
    run = SummaryLauncher(q, k, lse.contiguous(), scale, offset, cap, pattern, bias, None, config, False)
    b, h, n_i, _ = q.shape
    run_count = -(-k.shape[2] // config.run)
    for first, count in tile_ranges(run.tiles, max(1, rows_per_strip // config.rows)):
        tops = torch.zeros(b, h, count * config.rows, run_count, device=q.device, dtype=torch.float32)
        if tops.numel():
            run(SummaryTensors(), first, count, tops)
        rows = slice(first * config.rows, min((first + count) * config.rows, n_i))
        yield rows, tops[:, :, : rows.stop - rows.start]


def tile_ranges(tiles: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of consecutive ranges of at most `step` tiles."""
    for first in range(0, tiles, step):
        yield first, min(step, tiles - first)
