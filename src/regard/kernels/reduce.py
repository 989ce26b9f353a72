"""Reductions of softmax attention weights that are never stored, in one pass over q and k.

    A_ij = exp(s_ij - lse_i)                             s = q k^T * scale + bias, hidden entries -inf; lse is given
    entropy_i = -sum_j A ln A      max_i = max_j A       distance_i = sum_j A abs(i - j)
    received_j = sum_i A           map_rc = sum of A over the rows of bin r and the keys of bin c

One product and one exponential an entry. A program keeps a tile of rows and walks the keys they see, over tiles of
k q^T: in the result of a product a thread holds few of the first axis, keys, and many of the second, queries. What is
asked of rows is summed over the keys a thread holds, kept apart by thread, and put together once, at the end; what is
asked of keys is summed over the rows a thread holds, and four threads make a key's sum whole. No barrier, and a
sixteenth of the numbers passed from thread to thread. The map is made of the same sums: keys are dealt out so that
those of a thread are neighbours, and rows so that no eight of them belong to two bins; bins that do not fill their
eights are filled up with rows that see nothing.

Sums over rows leave the program by atomic adds, or, where PyTorch asks for deterministic algorithms, through a buffer
a tile of rows that is added up in a fixed order. Everything after the product is float32.

Cost: N x N x d multiply-adds on the visible tiles, O(N) memory. Widths up to 256; positions below 2^30.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shares import add_products, dealt_keys, keys_of_threads, larger, rows_of_threads
from .tiles import EVERYTHING, LN2, LOG2E, NEVER, NOTHING, Bias, Pattern, band, log2_weights, padded, ready, strides


@triton.jit
def _reduce(
    Q, K, LSE, LENGTHS, SLOPES, BIAS, ROWS, ROW_BINS, COL_BINS,
    FULL_COUNTS, FULL, PART_COUNTS, PART, WHERE, BITS,
    ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP,
    q_b, q_h, q_i, k_b, k_g, k_j, bias_0, bias_b, bias_h, bias_i, bias_j, full_b, full_h, full_r,
    part_b, part_h, part_r, received_tile, map_rows, map_cols,
    scale, offset, low, high, heads, n_i, n_j, first_tile, tiles,
    d: tl.constexpr,
    KV_GROUP: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    WARPS: tl.constexpr,
    BINS: tl.constexpr,  # parts of a tile of rows, none with rows of two bins
    WHOLE: tl.constexpr,  # do the keys a thread holds belong to one bin?
    CAP: tl.constexpr,
    LAST_FIRST: tl.constexpr,  # under a causal mask the last rows take longest
    BACKWARD: tl.constexpr,  # no query sees a key after it, and rows sum to 1
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
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
    lse2 = tl.where(lse > float("-inf"), lse * LOG2E, -NEVER)
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
    cells = None
    if MAP is not None:
        # The row of the map that each part of the rows adds to.
        if DETERMINISTIC:
            bin = place * BINS + tl.arange(0, BINS)
        else:
            leader = tile * I + tl.arange(0, BINS) * (I // BINS)
            if ROWS is not None:
                leader = tl.load(ROWS + leader)
            bin = tl.load(ROW_BINS + leader, mask=leader < n_i, other=0)
        cells = MAP + (b * heads + h) * map_rows * map_cols + bin.to(tl.int64) * map_cols
    for n in range(plain):
        if FULL is not None:
            col_tile = tl.load(full_list + n)
        else:
            col_tile = tl.where(n < before, full_start + n, crossed + n - before)
        entropy, largest, distance = _fold(
            q, K, lse2, entropy, largest, distance, row, position, first, col_tile, k_j, offset, scale, slope,
            BIAS, bias_i, bias_j, n_i, length, n_j, low, high, None, ENTROPY, RECEIVED, LARGEST, DISTANCE, cells,
            COL_BINS, d, I, J, D, WARPS, BINS, WHOLE, CAP, BACKWARD, False, DETERMINISTIC, PRECISION,
        )  # fmt: skip
    for n in range(careful):
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
        entropy, largest, distance = _fold(
            q, K, lse2, entropy, largest, distance, row, position, first, col_tile, k_j, offset, scale, slope,
            BIAS, bias_i, bias_j, n_i, length, n_j, low, high, bits, ENTROPY, RECEIVED, LARGEST, DISTANCE, cells,
            COL_BINS, d, I, J, D, WARPS, BINS, WHOLE, CAP, BACKWARD, True, DETERMINISTIC, PRECISION,
        )  # fmt: skip
    out = (b * heads + h) * n_i + row
    if ENTROPY is not None:
        tl.store(ENTROPY + out, tl.sum(entropy, 0) * -LN2, mask=row < n_i)
    if LARGEST is not None:
        tl.store(LARGEST + out, tl.max(largest, 0).to(tl.float32, bitcast=True), mask=row < n_i)
    if DISTANCE is not None:
        total = tl.sum(distance, 0)
        if BACKWARD:
            # sum of A (i - j) = sum of A (first - j) + (i - first) sum of A, and that sum is 1, or 0 in an empty row
            total += tl.where(lse > float("-inf"), position, 0.0)
        tl.store(DISTANCE + out, total, mask=row < n_i)


@triton.jit
def _fold(
    q, K, lse2, entropy, largest, distance, row, position, first, col_tile, k_j, offset, scale, slope,
    BIAS, bias_i, bias_j, n_i, length, n_j, low, high, BITS, ENTROPY, RECEIVED, LARGEST, DISTANCE, cells, COL_BINS,
    d: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    WARPS: tl.constexpr,
    BINS: tl.constexpr,
    WHOLE: tl.constexpr,
    CAP: tl.constexpr,
    BACKWARD: tl.constexpr,
    CAREFUL: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of A.T, added to what is known of its rows and its keys."""
    local = dealt_keys(J, WARPS)
    col = col_tile * J + local
    feature = tl.arange(0, D)
    # The tile moves the pointer; what is added to it is the same for every tile.
    keys = (K + col_tile.to(tl.int64) * J * k_j) + (local[:, None] * k_j + feature[None, :])
    if CAREFUL:
        k = tl.load(keys, mask=(col < n_j)[:, None] & (feature < d)[None, :], other=0.0)
    elif d != D:
        k = tl.load(keys, mask=(feature < d)[None, :], other=0.0)
    else:
        k = tl.load(keys)
    t = log2_weights(
        tl.dot(k, q, input_precision=PRECISION), lse2[None, :], row[None, :], col[:, None], offset, scale, slope,
        BIAS, bias_i, bias_j, n_i, length, low, high, BITS, tl.arange(0, I)[None, :], local[:, None],
        J, CAP, CAREFUL,
    )  # fmt: skip
    p = tl.exp2(t)
    share: tl.constexpr = J // (8 * min(WARPS, J // 16))
    p_held = keys_of_threads(p, I, J, WARPS)
    if ENTROPY is not None:
        entropy = add_products(entropy, p_held, keys_of_threads(t, I, J, WARPS), share)
    if LARGEST is not None:
        # Of numbers that are not negative the bits are ordered as they are, and whole numbers are compared by threes.
        largest = larger(largest, p_held.to(tl.int32, bitcast=True), share)
    if DISTANCE is not None:
        # Counted from the first row and the tile of keys: both numbers are small where they nearly cancel.
        start = col_tile * J - first
        if CAREFUL:
            gap = tl.abs(position[None, :] - (start + local).to(tl.float32)[:, None])
            if BACKWARD:
                gap -= position[None, :]
        elif BACKWARD:
            gap = tl.broadcast_to(-(start + local).to(tl.float32)[:, None], (J, I))
        else:
            # Off the diagonal all distances of a tile have one sign.
            sign = tl.where(start <= 0, 1.0, -1.0)
            gap = position[None, :] * sign - ((start + local).to(tl.float32) * sign)[:, None]
        distance = add_products(distance, p_held, keys_of_threads(gap, I, J, WARPS), share)
    if RECEIVED is not None or cells is not None:
        sums = tl.sum(rows_of_threads(p, I, J, BINS), 3)  # [J, BINS, 4]
        if RECEIVED is not None:
            # Warps that share keys add their sums one by one rather than wait for each other.
            sides: tl.constexpr = max(1, WARPS * 16 // J)
            received = tl.sum(tl.reshape(sums, (J, sides, BINS * 4 // sides)), 2)
            if DETERMINISTIC:
                tl.store(RECEIVED + col, tl.sum(received, 1), mask=col < n_j)
            else:
                inside = tl.broadcast_to((col < n_j)[:, None], (J, sides))
                tl.atomic_add(
                    RECEIVED + tl.broadcast_to(col[:, None], (J, sides)), received, mask=inside, sem="relaxed"
                )
        if cells is not None:
            if WHOLE:
                threads: tl.constexpr = 8 * min(WARPS, J // 16)
                sums = tl.sum(keys_of_threads(tl.reshape(sums, (J, BINS * 4)), BINS * 4, J, WARPS), 2)
                sums = tl.reshape(sums, (threads, BINS, 4))
                key = col_tile * J + tl.arange(0, threads) * (J // threads)
            else:
                key = col
            sums = tl.sum(sums, 2)
            bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
            inside = tl.broadcast_to((key < n_j)[:, None], sums.shape)
            tl.atomic_add(cells[None, :] + bin[:, None], sums, mask=inside, sem="relaxed")
            if DETERMINISTIC:
                tl.debug_barrier()
    return entropy, largest, distance


class Bins(NamedTuple):
    """Which row and which column of a map each query and each key falls into, the same for every batch row."""

    rows: Tensor  # i, int32, rising
    cols: Tensor  # j, int32, rising
    shape: tuple[int, int]
    least: tuple[int, int]  # the fewest queries, and keys, that a bin holds
    even: bool  # all bins hold that many


class Reduced(NamedTuple):
    """What was asked for, in float32; None what was not."""

    entropy: Tensor | None  # b h i
    received: Tensor | None  # b h j
    max: Tensor | None  # b h i
    distance: Tensor | None  # b h i
    map: Tensor | None  # b h rows cols, sums


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
    cap: float | None = None,
    pattern: Pattern = EVERYTHING,
    bias: Bias = NOTHING,
    bins: Bins | None = None,
    cut: Config | None = None,
    sums_to_one: bool = False,
) -> Reduced:
    """Any of "entropy", "received", "max", "distance", and the map of `bins`: `b h i d, b g j d, b h i -> ...`.

    Lists in `pattern` are cut as `config` says, over rows as `dealt_rows` deals them out. `sums_to_one` promises that
    every row that sees a key does; distances under a causal mask are then had for less.
    """
    q, k, lse = ready(q), ready(k), lse.contiguous()
    b, h, n_i, d = q.shape
    n_j = k.shape[2]
    cut = cut or config(d, q.dtype)
    parts, rows = (cut.sides, None) if bins is None else dealt_rows(bins, n_i, cut)
    tiles = triton.cdiv(n_i if rows is None else rows.numel(), cut.rows)
    deterministic = torch.are_deterministic_algorithms_enabled()

    def blank(name: str, n: int) -> Tensor | None:
        if name not in want:
            return None
        # Every row is written; keys are added to.
        make = torch.empty if name != "received" and n_j else torch.zeros
        return make(b, h, n, device=q.device, dtype=torch.float32)

    out = Reduced(blank("entropy", n_i), blank("received", n_j), blank("max", n_i), blank("distance", n_i), None)
    if bins is not None:
        out = out._replace(map=torch.zeros(b, h, *bins.shape, device=q.device, dtype=torch.float32))
    if not (b and n_i and n_j):
        return out
    launch = Launch(q, k, lse, scale, offset, cap, pattern, bias, bins, parts, rows, cut, deterministic, sums_to_one)
    if not deterministic:
        launch(out, 0, tiles)
        return out
    step = max(1, PARTIAL // (b * h * n_j))
    for first in range(0, tiles, step):
        count = min(step, tiles - first)
        received = None if out.received is None else q.new_zeros(count, b, h, n_j, dtype=torch.float32)
        slabs = None
        if bins is not None:
            slabs = q.new_zeros(b, h, count * parts, bins.shape[1], dtype=torch.float32)
        launch(out._replace(received=received, map=slabs), first, count)
        if out.received is not None and received is not None:
            out.received.add_(received.sum(0))
        if bins is not None and out.map is not None and slabs is not None:
            leaders = _leaders(rows, tiles * cut.rows, cut.rows // parts)[first * parts : (first + count) * parts]
            _add_slabs(out.map, slabs, bins.rows[leaders.clamp(max=n_i - 1).to(q.device)])
    return out


class Launch(NamedTuple):
    """Everything about a launch but where its results go."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    offset: int
    cap: float | None
    pattern: Pattern
    bias: Bias
    bins: Bins | None
    parts: int  # of a tile of rows
    rows: Tensor | None
    cut: Config
    deterministic: bool
    sums_to_one: bool

    def __call__(self, out: Reduced, first: int, count: int) -> None:
        """Reduce `count` tiles of rows."""
        q, k, cut, bins, lists = self.q, self.k, self.cut, self.bins, self.pattern.lists
        b, h, n_i, d = q.shape
        g, n_j = k.shape[1:3]
        values = self.bias.values
        steps: tuple[int, ...] = self.bias.steps or (0, 0, 0, 0)
        if values is not None and self.bias.steps is None:
            values = values.expand(b, h, n_i, n_j)
            steps = values.stride()
        _reduce[(count * b * h,)](
            q, k, self.lse, self.pattern.lengths, self.bias.slopes, values, self.rows,
            None if bins is None else bins.rows, None if bins is None else bins.cols,
            *((None,) * 6 if lists is None else lists),
            out.entropy, out.received, out.max, out.distance, out.map,
            *q.stride()[:3], *k.stride()[:3], self.bias.origin, *steps,
            *((0,) * 6 if lists is None else (*strides(lists.full), *strides(lists.part))),
            b * h * n_j if self.deterministic else 0,
            0 if out.map is None else out.map.shape[2], 0 if out.map is None else out.map.shape[3],
            self.scale, self.offset, self.pattern.low, self.pattern.high, h, n_i, n_j, first, count,
            d=d,
            KV_GROUP=h // g,
            I=cut.rows,
            J=cut.cols,
            D=padded(d),
            WARPS=cut.warps,
            BINS=self.parts,
            WHOLE=bins is None or (bins.even and bins.least[1] % (cut.cols // cut.threads) == 0),
            CAP=self.cap,
            LAST_FIRST=self.pattern.low > -n_j,
            BACKWARD=self.sums_to_one and self.pattern.low >= 0,
            DETERMINISTIC=self.deterministic,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=cut.warps,
            num_stages=cut.stages,
            maxnreg=cut.registers,
        )  # fmt: skip


@lru_cache(maxsize=16)
def dealt_rows(bins: Bins, n_i: int, cut: Config) -> tuple[int, Tensor | None]:
    """How many parts a tile of rows has, none with rows of two bins, and the rows in the order they are dealt out.

    Bins are filled up to whole parts with n_i, a row that is not there; None for 0, 1, 2, ...
    """
    even = bins.least[0] & -bins.least[0]  # the largest power of two that divides it
    if bins.even and even >= 8:
        return max(cut.sides, cut.rows // even), None
    counts = torch.bincount(bins.rows, minlength=bins.shape[0])
    places = (counts + 7) // 8 * 8
    starts = places.cumsum(0) - places
    within = torch.arange(n_i, device=bins.rows.device) - (counts.cumsum(0) - counts)[bins.rows]
    total = triton.cdiv(n_i + bins.shape[0] * 7, cut.rows) * cut.rows
    dealt = torch.full((total,), n_i, dtype=torch.int32, device=bins.rows.device)
    dealt[starts[bins.rows] + within] = torch.arange(n_i, dtype=torch.int32, device=bins.rows.device)
    return cut.rows // 8, dealt


def _leaders(rows: Tensor | None, n: int, size: int) -> Tensor:
    """The first row of each part."""
    return torch.arange(0, n, size) if rows is None else rows[::size].long()


def _add_slabs(total: Tensor, slabs: Tensor, bins: Tensor) -> None:
    """Add each group's row of the map to the map, in an order that never changes: bins rise, so runs are summed."""
    ids, counts = bins.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).tolist()
    for bin, start, end in zip(ids.tolist(), [0, *ends], ends, strict=False):
        total[:, :, bin] += slabs[:, :, start:end].sum(2)
