"""Add one tile of the weights to the sums per row, per key and per bin.

The tile is one of A.T, in the thread layout of a tensor-core product (see `thread_layout`). Sums per row run over the
keys a thread holds and stay separate per thread. Sums per key and bin run over the rows a thread holds, and are written
at once. Outputs that were not requested are not compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..tiles import log2_weights
from .thread_layout import add_products, key_order, keys_by_thread, queries_by_thread, running_max


class RowTile(NamedTuple):
    """The rows a program keeps."""

    q: Any  # [D, I]
    lse2: Any  # log2 of each row's sum of exponentials
    row: Any
    position: Any  # position of each row minus `first`
    first: Any  # position of the first row


class TileOutputs(NamedTuple):
    """Pointers to the outputs of this program; None for outputs that were not requested."""

    ENTROPY: Any
    RECEIVED: Any
    LARGEST: Any
    DISTANCE: Any
    slots: Any  # [I, WIDE], a one in the slot of each row; None if bins are parts of the tile
    cells: Any  # the map
    at: Any  # [PARTS or WIDE], the map row each part or slot adds to, times the width of the map
    peaks: Any
    tops: Any
    COL_BINS: Any


@triton.jit
def add_tile(
    entropy, largest, distance, rows, keys, terms, out, n_i, col_tile, BITS, d,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return the three sums per row with one tile of A.T added; write the sums per key and bin."""
    local = key_order(J, WARPS)
    col = col_tile * J + local
    feature = tl.arange(0, D)
    # The tile index is added to the base pointer, so that the offsets are the same for every tile.
    at = (keys.K + col_tile.to(tl.int64) * J * keys.k_j) + (local[:, None] * keys.k_j + feature[None, :])
    if CAREFUL:
        k = tl.load(at, mask=(col < keys.n_j)[:, None] & (feature // STEP < d // STEP)[None, :], other=0.0)
    elif STEP < D:
        k = tl.load(at, mask=(feature // STEP < d // STEP)[None, :], other=0.0)
    else:
        k = tl.load(at)
    t = log2_weights(
        tl.dot(k, rows.q, input_precision=PRECISION), rows.lse2[None, :], rows.row[None, :], col[:, None], terms.offset,
        terms.scale, terms.slope, terms.BIAS, terms.bias_i, terms.bias_j, n_i, keys.length, keys.low, keys.high, BITS,
        tl.arange(0, I)[None, :], local[:, None], J, CAP, CAREFUL,
    )  # fmt: skip
    p = tl.exp2(t)
    share: tl.constexpr = J // (8 * min(WARPS, J // 16))
    p_held = keys_by_thread(p, I, J, WARPS)
    if out.ENTROPY is not None:
        entropy = add_products(entropy, p_held, keys_by_thread(t, I, J, WARPS), share)
    if out.LARGEST is not None:
        # The bits of non-negative floats are ordered like the floats, and integers are compared three at a time.
        largest = running_max(largest, p_held.to(tl.int32, bitcast=True), share)
    if out.DISTANCE is not None:
        # Counted from the first row and the tile of keys: both numbers are small where they nearly cancel.
        start = col_tile * J - rows.first
        if CAREFUL:
            gap = tl.abs(rows.position[None, :] - (start + local).to(tl.float32)[:, None])
            if CAUSAL:
                gap -= rows.position[None, :]
        elif CAUSAL:
            gap = tl.broadcast_to(-(start + local).to(tl.float32)[:, None], (J, I))
        else:
            # Off the diagonal all distances of a tile have the same sign.
            sign = tl.where(start <= 0, 1.0, -1.0)
            gap = rows.position[None, :] * sign - ((start + local).to(tl.float32) * sign)[:, None]
        distance = add_products(distance, p_held, keys_by_thread(gap, I, J, WARPS), share)
    if out.RECEIVED is not None or out.cells is not None:
        if PARTS:
            held = tl.sum(queries_by_thread(p, I, J, PARTS), 3)  # [J, PARTS, 4]
            # Warps that share keys add their sums one by one rather than wait for each other.
            sides: tl.constexpr = max(1, WARPS * 16 // J)
            received = tl.sum(tl.reshape(held, (J, sides, PARTS * 4 // sides)), 2)
        else:
            sums = tl.dot(p.to(out.slots.dtype), out.slots, input_precision=PRECISION)  # [J, WIDE]
            received = tl.sum(sums, 1)[:, None]
        if out.RECEIVED is not None:
            if DETERMINISTIC:
                tl.store(out.RECEIVED + col, tl.sum(received, 1), mask=col < keys.n_j)
            else:
                inside = tl.broadcast_to((col < keys.n_j)[:, None], received.shape)
                tl.atomic_add(
                    out.RECEIVED + tl.broadcast_to(col[:, None], received.shape), received, mask=inside, sem="relaxed"
                )
        if out.cells is not None:
            key = col_tile * J + tl.arange(0, J // share) * share
            if PARTS and WHOLE and not DETERMINISTIC:
                pairs = tl.sum(keys_by_thread(tl.reshape(held, (J, PARTS * 4)), PARTS * 4, J, WARPS), 2)
                by_bin = tl.sum(tl.reshape(pairs, (J // share, PARTS, 4)), 2)
                _add_to_map(by_bin, out.cells, out.at, key, out.COL_BINS, keys.n_j)
            else:
                if PARTS:
                    sums = tl.sum(held, 2)
                if DETERMINISTIC:
                    tl.store(out.cells + (out.at[None, :] + col[:, None]), sums, mask=(col < keys.n_j)[:, None])
                else:
                    _add_keys_to_map(sums, out.cells, out.at, key, out.COL_BINS, keys.n_j, J, WARPS, CAREFUL)
    if out.peaks is not None:
        # A row past the end shares the bin of real rows, and is NaN if a key is.
        p = tl.where((rows.row < n_i)[None, :], p, 0.0)
        _raise_peaks(p, out.peaks, out.COL_BINS, col, col_tile, keys.n_j, I, J, WARPS, PARTS, WHOLE)
    if out.tops is not None:
        _store_run_maxima(p_held, out.tops, rows.row, col_tile, n_i, keys.n_j, I, J, WARPS)
    return entropy, largest, distance


@triton.jit
def _add_to_map(sums, cells, at, key, COL_BINS, n_j):
    """Add to the map sums over runs of keys that start at each `key` and lie in one bin."""
    bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
    inside = (key < n_j)[:, None] & (at >= 0)[None, :]
    tl.atomic_add(cells + (at[None, :] + bin[:, None]), sums, mask=inside, sem="relaxed")


@triton.jit
def _add_keys_to_map(
    sums, cells, at, key, COL_BINS, n_j, J: tl.constexpr, WARPS: tl.constexpr, CAREFUL: tl.constexpr
):  # fmt: skip
    """Add to the map sums of single keys. A thread holds two neighbours and adds them together if they share a bin."""
    held = keys_by_thread(sums, sums.shape[1], J, WARPS)
    first, second = tl.split(held)
    bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
    next = tl.load(COL_BINS + key + 1, mask=key + 1 < n_j, other=0)  # past the end the sum is 0, so any bin will do
    apart = (next != bin)[:, None]
    first += tl.where(apart, 0.0, second)
    second = tl.where(apart, second, 0.0)
    inside = tl.broadcast_to((at >= 0)[None, :], first.shape)
    if CAREFUL:
        inside = inside & (key < n_j)[:, None]
    tl.atomic_add(cells + (at[None, :] + bin[:, None]), first, mask=inside, sem="relaxed")
    tl.atomic_add(cells + (at[None, :] + next[:, None]), second, mask=inside & apart, sem="relaxed")


@triton.jit
def _raise_peaks(
    p, peaks, COL_BINS, col, col_tile, n_j,
    I: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
    BINS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Raise the maximum of each bin to the largest weight in this tile."""
    rows: tl.constexpr = I // BINS // 4
    held = tl.reshape(queries_by_thread(p.to(tl.int32, bitcast=True), I, J, BINS), (J, BINS * 4, rows))
    most = running_max(tl.zeros((J, BINS * 4), tl.int32), held, rows)
    if WHOLE:
        threads: tl.constexpr = 8 * min(WARPS, J // 16)
        held = keys_by_thread(most, BINS * 4, J, WARPS)
        most = running_max(tl.zeros((threads, BINS * 4), tl.int32), held, J // threads)
        key = col_tile * J + tl.arange(0, threads) * (J // threads)
    else:
        key = col
    most = tl.max(tl.reshape(most, (most.shape[0], BINS, 4)), 2)
    bin = tl.load(COL_BINS + key, mask=key < n_j, other=0)
    inside = tl.broadcast_to((key < n_j)[:, None], most.shape)
    tl.atomic_max(peaks[None, :] + bin[:, None], most, mask=inside, sem="relaxed")


@triton.jit
def _store_run_maxima(
    p_held, tops, row, col_tile, n_i, n_j,
    I: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Store the largest weight of each row among the neighbouring keys that a warp holds."""
    warps: tl.constexpr = min(WARPS, J // 16)
    share: tl.constexpr = J // (8 * warps)
    most = running_max(tl.zeros((8 * warps, I), tl.int32), p_held.to(tl.int32, bitcast=True), share)
    most = tl.max(tl.reshape(most, (warps, 8, I)), 1)
    run = col_tile * warps + tl.arange(0, warps)
    inside = (run * (J // warps) < n_j)[:, None] & (row < n_i)[None, :]
    tl.store(tops[None, :] + run[:, None], most.to(tl.float32, bitcast=True), mask=inside)
