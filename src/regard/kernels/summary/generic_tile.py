"""One tile of the weights, folded into what is asked of its rows, its keys and its bins.

The tile is that of A.T, in the layout of a product: see `shares`. Rows gather over the keys a thread holds and stay
apart by thread; keys and bins gather over the rows a thread holds. What is not asked for is not compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import log2_weights
from .thread_layout import add_products, dealt_keys, keys_of_threads, larger, rows_of_threads


@triton.jit
def fold(
    q, K, lse2, entropy, largest, distance, row, position, first, col_tile, k_j, offset, scale, slope,
    BIAS, bias_i, bias_j, n_i, length, n_j, low, high, BITS, ENTROPY, RECEIVED, LARGEST, DISTANCE, slots, cells,
    at, peaks, tops, COL_BINS,
    d: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    WARPS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    CAP: tl.constexpr,
    BACKWARD: tl.constexpr,
    CAREFUL: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What is known of the rows, with one tile of A.T more; what is known of keys and bins is written."""
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
        if PARTS:
            held = tl.sum(rows_of_threads(p, I, J, PARTS), 3)  # [J, PARTS, 4]
            # Warps that share keys add their sums one by one rather than wait for each other.
            sides: tl.constexpr = max(1, WARPS * 16 // J)
            received = tl.sum(tl.reshape(held, (J, sides, PARTS * 4 // sides)), 2)
        else:
            sums = tl.dot(p.to(slots.dtype), slots, input_precision=PRECISION)  # [J, WIDE]
            received = tl.sum(sums, 1)[:, None]
        if RECEIVED is not None:
            if DETERMINISTIC:
                tl.store(RECEIVED + col, tl.sum(received, 1), mask=col < n_j)
            else:
                inside = tl.broadcast_to((col < n_j)[:, None], received.shape)
                tl.atomic_add(
                    RECEIVED + tl.broadcast_to(col[:, None], received.shape), received, mask=inside, sem="relaxed"
                )
        if cells is not None:
            key = col_tile * J + tl.arange(0, J // share) * share
            if PARTS and WHOLE and not DETERMINISTIC:
                pairs = tl.sum(keys_of_threads(tl.reshape(held, (J, PARTS * 4)), PARTS * 4, J, WARPS), 2)
                _add(tl.sum(tl.reshape(pairs, (J // share, PARTS, 4)), 2), cells, at, key, COL_BINS, n_j)
            else:
                if PARTS:
                    sums = tl.sum(held, 2)
                if DETERMINISTIC:
                    tl.store(cells + (at[None, :] + col[:, None]), sums, mask=(col < n_j)[:, None])
                else:
                    _add_pairs(sums, cells, at, key, COL_BINS, n_j, J, WARPS, CAREFUL)
    if peaks is not None:
        # A row past the end lies in the bin of others, and may be NaN where a key is.
        p = tl.where((row < n_i)[None, :], p, 0.0)
        _raise_bins(p, peaks, COL_BINS, col, col_tile, n_j, I, J, WARPS, PARTS, WHOLE)
    if tops is not None:
        _store_tops(p_held, tops, row, col_tile, n_i, n_j, I, J, WARPS)
    return entropy, largest, distance


@triton.jit
def _add(sums, cells, at, key, COL_BINS, n_j):
    """Sums of the keys from each `key` on, all of its bin, added to the map."""
    bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
    inside = (key < n_j)[:, None] & (at >= 0)[None, :]
    tl.atomic_add(cells + (at[None, :] + bin[:, None]), sums, mask=inside, sem="relaxed")


@triton.jit
def _add_pairs(
    sums, cells, at, key, COL_BINS, n_j, J: tl.constexpr, WARPS: tl.constexpr, CAREFUL: tl.constexpr
):  # fmt: skip
    """Sums of single keys added to the map, those of a thread, two neighbours, together where a bin holds both."""
    held = keys_of_threads(sums, sums.shape[1], J, WARPS)
    first, second = tl.split(held)
    bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
    next = tl.load(COL_BINS + key + 1, mask=key + 1 < n_j, other=0)  # past the end there is nothing to add
    apart = (next != bin)[:, None]
    first += tl.where(apart, 0.0, second)
    second = tl.where(apart, second, 0.0)
    inside = tl.broadcast_to((at >= 0)[None, :], first.shape)
    if CAREFUL:
        inside = inside & (key < n_j)[:, None]
    tl.atomic_add(cells + (at[None, :] + bin[:, None]), first, mask=inside, sem="relaxed")
    tl.atomic_add(cells + (at[None, :] + next[:, None]), second, mask=inside & apart, sem="relaxed")


@triton.jit
def _raise_bins(
    p, peaks, COL_BINS, col, col_tile, n_j,
    I: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
    BINS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest weight of each bin, where this tile holds a larger one."""
    rows: tl.constexpr = I // BINS // 4
    held = tl.reshape(rows_of_threads(p.to(tl.int32, bitcast=True), I, J, BINS), (J, BINS * 4, rows))
    most = larger(tl.zeros((J, BINS * 4), tl.int32), held, rows)
    if WHOLE:
        threads: tl.constexpr = 8 * min(WARPS, J // 16)
        held = keys_of_threads(most, BINS * 4, J, WARPS)
        most = larger(tl.zeros((threads, BINS * 4), tl.int32), held, J // threads)
        key = col_tile * J + tl.arange(0, threads) * (J // threads)
    else:
        key = col
    most = tl.max(tl.reshape(most, (most.shape[0], BINS, 4)), 2)
    bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
    inside = tl.broadcast_to((key < n_j)[:, None], most.shape)
    tl.atomic_max(peaks[None, :] + bin[:, None], most, mask=inside, sem="relaxed")


@triton.jit
def _store_tops(
    p_held, tops, row, col_tile, n_i, n_j,
    I: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """The largest weight of each row among the neighbouring keys that a warp holds."""
    warps: tl.constexpr = min(WARPS, J // 16)
    share: tl.constexpr = J // (8 * warps)
    most = larger(tl.zeros((8 * warps, I), tl.int32), p_held.to(tl.int32, bitcast=True), share)
    most = tl.max(tl.reshape(most, (warps, 8, I)), 1)
    run = col_tile * warps + tl.arange(0, warps)
    inside = (run * (J // warps) < n_j)[:, None] & (row < n_i)[None, :]
    tl.store(tops[None, :] + run[:, None], most.to(tl.float32, bitcast=True), mask=inside)
