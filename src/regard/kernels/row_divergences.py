"""Divergences between the rows of two softmax attention matrices that are never stored, and their gradients.

    A_ij = exp(s_ij - lse_i), B_ij likewise from queries, keys and terms of its own     D_i = sum_j D_ij
    kl: A ln(A / B)    js: (A ln(A / M) + B ln(B / M)) / 2, M = (A + B) / 2    mse: (A - B)^2 / n    dot: A B

With a_ij = A_ij dD/dA_ij, b_ij = B_ij dD/dB_ij, their sums over the row a_i and b_i, and gradients g_i of D_i:

    dL/ds_ij = g_i (a_ij - A_ij a_i) on the side of A, g_i (b_ij - B_ij b_i) on the side of B

The forward keeps D_i, a_i and b_i. The gradients of queries are products of dL/ds with the keys, a tile of rows at a
time, those of keys products with the queries, a tile of keys at a time. Both compute the tiles of A and B again.

Cost: N x N x (d of A + d of B) multiply-adds forward and 4 times that backward, on the tiles that a side sees, and O(N)
memory. Limits: widths up to 256. Both sides have one pattern, or each a band of diagonals and lengths of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_cache import launch
from .tiles import (
    ALL_VISIBLE,
    LN2,
    LOG2_ZERO,
    LOG2E,
    NO_BIAS,
    KernelBias,
    KeyStream,
    Pattern,
    RowStream,
    ScoreTerms,
    dot_precision,
    list_strides,
    log2_weights,
    padded_width,
    visible_tiles,
    with_contiguous_features,
)


class SideStream(NamedTuple):
    """Inside the kernel: one of the two matrices."""

    rows: Any
    keys: Any
    terms: Any


class RowSums(NamedTuple):
    """The sums a_i and b_i and the gradients g_i of the module docstring, `b h i`; inside the kernel, pointers."""

    a: Any
    b: Any
    grad: Any


@triton.jit
def _token_streams(
    b, h, Q, K, LSE, LENGTHS, q_b, q_h, q_i, k_b, k_g, k_j, low, high, heads, n_i, n_j,
    KV_GROUP: tl.constexpr,
):  # fmt: skip
    """Return the queries and the keys of one matrix for batch row b and head h.

    Its terms are not made here: a function of Triton 3.6 cannot return None.
    """
    length = n_j
    if LENGTHS is not None:
        length = tl.minimum(n_j, tl.load(LENGTHS + b))
    rows = RowStream(Q + b * q_b + h * q_h, q_i, LSE + (b * heads + h) * n_i, n_i)
    return rows, KeyStream(K + b * k_b + (h // KV_GROUP) * k_g, k_j, length, n_j, low, high)


@triton.jit
def _tile_range(
    tile,
    side,
    I: tl.constexpr,
    J: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """Return the tiles start..stop that a tile of rows sees, or is seen by, and full_start..full_stop, seen in full."""
    keys, offset, n_i = side.keys, side.terms.offset, side.rows.n_i
    if BY_KEYS:
        # The row at r sees the key at j if low <= r + offset - j <= high, which is a band of rows for each key.
        first, last = tile * J - offset, tl.minimum(tile * J + J, keys.length) - 1 - offset
        start, stop, full_start, full_stop, _, _ = visible_tiles(first, last, -keys.high, -keys.low, n_i, I)
        stop = tl.where(tile * J < keys.length, stop, start)
        full_stop = tl.where(tile * J + J > keys.length, full_start, full_stop)
    else:
        first, last = tile * I + offset, tl.minimum(tile * I + I, n_i) - 1 + offset
        start, stop, full_start, full_stop, _, _ = visible_tiles(first, last, keys.low, keys.high, keys.length, J)
    return start, stop, full_start, full_stop


@triton.jit
def _tiles_to_visit(
    tile, A, B, b, h, FULL_COUNTS, PART_COUNTS, full_b, full_h, full_r, part_b, part_h, part_r,
    I: tl.constexpr,
    J: tl.constexpr,
    BY_KEYS: tl.constexpr,
    ONE_PATTERN: tl.constexpr,
):  # fmt: skip
    """Return how many tiles are plain and how many careful, and the ranges they are in unless they come as lists."""
    start, full_start, full_stop = 0, 0, 0
    if FULL_COUNTS is not None:
        plain = tl.load(FULL_COUNTS + (b * full_b + h * full_h) // full_r + tile)
        careful = tl.load(PART_COUNTS + (b * part_b + h * part_h) // part_r + tile)
    else:
        start, stop, full_start, full_stop = _tile_range(tile, A, I, J, BY_KEYS)
        if not ONE_PATTERN:
            other_start, other_stop, _, _ = _tile_range(tile, B, I, J, BY_KEYS)
            # A side that sees nothing has stop = start, anywhere.
            is_seen, is_seen_there = stop > start, other_stop > other_start
            first = tl.where(is_seen_there, tl.where(is_seen, tl.minimum(start, other_start), other_start), start)
            stop = tl.where(is_seen_there, tl.where(is_seen, tl.maximum(stop, other_stop), other_stop), stop)
            start, full_start, full_stop = first, first, first
        plain = full_stop - full_start
        careful = stop - start - plain
    return plain, careful, start, full_start, full_stop


@triton.jit
def _load_queries(rows, row, d: tl.constexpr, D: tl.constexpr):
    """Return the queries [I, D] and log2 of their sums of exponentials [I]."""
    feature = tl.arange(0, D)
    q = tl.load(
        rows.Q + row.to(tl.int64)[:, None] * rows.q_i + feature[None, :],
        mask=(row < rows.n_i)[:, None] & (feature < d)[None, :],
        other=0.0,
    )
    lse = tl.load(rows.LSE + row, mask=row < rows.n_i, other=float("-inf"))
    return q, tl.where(lse == float("-inf"), -LOG2_ZERO, lse * LOG2E)


@triton.jit
def _load_keys(keys, col, d: tl.constexpr, D: tl.constexpr):
    """Return the keys [J, D]."""
    feature = tl.arange(0, D)
    return tl.load(
        keys.K + col.to(tl.int64)[:, None] * keys.k_j + feature[None, :],
        mask=(col < keys.n_j)[:, None] & (feature < d)[None, :],
        other=0.0,
    )


@triton.jit
def _log2_tile(
    side, q, k, lse2, row_tile, col_tile, BITS,
    I: tl.constexpr,
    J: tl.constexpr,
    BY_KEYS: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return log2 of the weights of one tile, [I, J], or [J, I] if BY_KEYS."""
    local_row, local_col = tl.arange(0, I), tl.arange(0, J)
    row, col = row_tile * I + local_row, col_tile * J + local_col
    if BY_KEYS:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        lse2, row, col = lse2[None, :], row[None, :], col[:, None]
        local_row, local_col = local_row[None, :], local_col[:, None]
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        lse2, row, col = lse2[:, None], row[:, None], col[None, :]
        local_row, local_col = local_row[:, None], local_col[None, :]
    terms, keys = side.terms, side.keys
    return log2_weights(
        s, lse2, row, col, terms.offset, terms.scale, terms.slope, terms.BIAS, terms.bias_i, terms.bias_j,
        side.rows.n_i, keys.length, keys.low, keys.high, BITS, local_row, local_col, J, CAP, CAREFUL,
    )  # fmt: skip


@triton.jit
def _entries(t_a, t_b, n_j, KIND: tl.constexpr):
    """Return A, B, D_ij, a_ij and b_ij of the module docstring from log2 A and log2 B."""
    A, B = tl.exp2(t_a), tl.exp2(t_b)
    if KIND == "kl":
        value = tl.where((A > 0) & (t_b < LOG2_ZERO / 2), float("inf"), A * ((t_a - t_b) * LN2))
        by_a, by_b = value + A, -A
    elif KIND == "js":
        # log2(A / M) = 1 - log2(1 + B / A), exact for equal weights
        gap = t_b - t_a
        tail = 1 - tl.log2(1 + tl.exp2(-tl.abs(gap)))
        by_a = A * ((tail - tl.maximum(gap, 0.0)) * (LN2 / 2))
        by_b = B * ((tail - tl.maximum(-gap, 0.0)) * (LN2 / 2))
        value = by_a + by_b
    elif KIND == "mse":
        slope = (A - B) * (2.0 / n_j)
        by_a, by_b = A * slope, -B * slope
        value = (A - B) * slope * 0.5
    else:
        value = A * B
        by_a, by_b = value, value
    return A, B, value, by_a, by_b


@triton.jit
def _divergence_kernel(
    QA, KA, LSEA, LENGTHSA, SLOPESA, BIASA, QB, KB, LSEB, LENGTHSB, SLOPESB, BIASB,
    FULL_COUNTS, FULL, PART_COUNTS, PART, BITS_INDEX, BITS, VALUE, ROW_A, ROW_B,
    qa_b, qa_h, qa_i, ka_b, ka_g, ka_j, bias_a0, bias_ab, bias_ah, bias_ai, bias_aj, scale_a, offset_a, low_a, high_a,
    qb_b, qb_h, qb_i, kb_b, kb_g, kb_j, bias_b0, bias_bb, bias_bh, bias_bi, bias_bj, scale_b, offset_b, low_b, high_b,
    full_b, full_h, full_r, part_b, part_h, part_r, heads, n_i, n_j, tiles,
    da: tl.constexpr,
    db: tl.constexpr,
    KV_GROUP_A: tl.constexpr,
    KV_GROUP_B: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    CAP_A: tl.constexpr,
    CAP_B: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    ONE_PATTERN: tl.constexpr,
):  # fmt: skip
    """Compute the divergences of one tile of rows, and their sums a_i and b_i unless ROW_A is None."""
    tile = tiles - 1 - tl.program_id(0) % tiles  # the last rows first: under a causal mask they take longest
    bh = tl.program_id(0) // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    rows_a, keys_a = _token_streams(
        b, h, QA, KA, LSEA, LENGTHSA, qa_b, qa_h, qa_i, ka_b, ka_g, ka_j, low_a, high_a, heads, n_i, n_j, KV_GROUP_A
    )
    rows_b, keys_b = _token_streams(
        b, h, QB, KB, LSEB, LENGTHSB, qb_b, qb_h, qb_i, kb_b, kb_g, kb_j, low_b, high_b, heads, n_i, n_j, KV_GROUP_B
    )
    slope_a, slope_b = None, None
    if SLOPESA is not None:
        slope_a = tl.load(SLOPESA + h).to(tl.float32)
    if SLOPESB is not None:
        slope_b = tl.load(SLOPESB + h).to(tl.float32)
    if BIASA is not None:
        BIASA += bias_a0 + b * bias_ab + h * bias_ah
    if BIASB is not None:
        BIASB += bias_b0 + b * bias_bb + h * bias_bh
    A = SideStream(rows_a, keys_a, ScoreTerms(offset_a, scale_a, slope_a, BIASA, bias_ai, bias_aj))
    B = SideStream(rows_b, keys_b, ScoreTerms(offset_b, scale_b, slope_b, BIASB, bias_bi, bias_bj))
    plain, careful, start, full_start, full_stop = _tiles_to_visit(
        tile, A, B, b, h, FULL_COUNTS, PART_COUNTS, full_b, full_h, full_r, part_b, part_h, part_r,
        I, J, False, ONE_PATTERN,
    )  # fmt: skip
    full_list = b * full_b + h * full_h + tile.to(tl.int64) * full_r
    part_list = b * part_b + h * part_h + tile.to(tl.int64) * part_r
    row = tile * I + tl.arange(0, I)
    q_a, lse_a = _load_queries(A.rows, row, da, DA)
    q_b, lse_b = _load_queries(B.rows, row, db, DB)
    value, sum_a, sum_b = (tl.zeros((I,), tl.float32), tl.zeros((I,), tl.float32), tl.zeros((I,), tl.float32))
    for n in range(plain):
        other = tl.load(FULL + full_list + n) if FULL is not None else full_start + n
        col = other * J + tl.arange(0, J)
        k_a, k_b = _load_keys(A.keys, col, da, DA), _load_keys(B.keys, col, db, DB)
        t_a = _log2_tile(A, q_a, k_a, lse_a, tile, other, None, I, J, False, CAP_A, PRECISION, False)
        t_b = _log2_tile(B, q_b, k_b, lse_b, tile, other, None, I, J, False, CAP_B, PRECISION, False)
        _, _, each, by_a, by_b = _entries(t_a, t_b, n_j, KIND)
        value += tl.sum(each, 1)
        if ROW_A is not None:
            sum_a += tl.sum(by_a, 1)
            sum_b += tl.sum(by_b, 1)
    for n in tl.range(careful, num_stages=1):
        if FULL is not None:
            other = tl.load(PART + part_list + n)
            bits = BITS + tl.load(BITS_INDEX + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            other = tl.where(n < ahead, start + n, full_stop + n - ahead)
            bits = None
        col = other * J + tl.arange(0, J)
        k_a, k_b = _load_keys(A.keys, col, da, DA), _load_keys(B.keys, col, db, DB)
        t_a = _log2_tile(A, q_a, k_a, lse_a, tile, other, bits, I, J, False, CAP_A, PRECISION, True)
        t_b = _log2_tile(B, q_b, k_b, lse_b, tile, other, bits, I, J, False, CAP_B, PRECISION, True)
        _, _, each, by_a, by_b = _entries(t_a, t_b, n_j, KIND)
        value += tl.sum(each, 1)
        if ROW_A is not None:
            sum_a += tl.sum(by_a, 1)
            sum_b += tl.sum(by_b, 1)
    at = (b * heads + h) * n_i + row
    tl.store(VALUE + at, value, mask=row < n_i)
    if ROW_A is not None:
        tl.store(ROW_A + at, sum_a, mask=row < n_i)
        tl.store(ROW_B + at, sum_b, mask=row < n_i)


@triton.jit
def _gradient_kernel(
    QA, KA, LSEA, LENGTHSA, SLOPESA, BIASA, QB, KB, LSEB, LENGTHSB, SLOPESB, BIASB,
    FULL_COUNTS, FULL, PART_COUNTS, PART, BITS_INDEX, BITS, ROW_A, ROW_B, GRAD, OUT_A, OUT_B,
    qa_b, qa_h, qa_i, ka_b, ka_g, ka_j, bias_a0, bias_ab, bias_ah, bias_ai, bias_aj, scale_a, offset_a, low_a, high_a,
    qb_b, qb_h, qb_i, kb_b, kb_g, kb_j, bias_b0, bias_bb, bias_bh, bias_bi, bias_bj, scale_b, offset_b, low_b, high_b,
    full_b, full_h, full_r, part_b, part_h, part_r, heads, n_i, n_j, tiles,
    da: tl.constexpr,
    db: tl.constexpr,
    KV_GROUP_A: tl.constexpr,
    KV_GROUP_B: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    CAP_A: tl.constexpr,
    CAP_B: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    ONE_PATTERN: tl.constexpr,
    BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of queries of both sides, or of one tile of keys if BY_KEYS.

    A side whose output is None is left out.
    """
    tile = tl.program_id(0) % tiles
    if not BY_KEYS:
        tile = tiles - 1 - tile  # the longest first under a causal mask
    bh = tl.program_id(0) // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    rows_a, keys_a = _token_streams(
        b, h, QA, KA, LSEA, LENGTHSA, qa_b, qa_h, qa_i, ka_b, ka_g, ka_j, low_a, high_a, heads, n_i, n_j, KV_GROUP_A
    )
    rows_b, keys_b = _token_streams(
        b, h, QB, KB, LSEB, LENGTHSB, qb_b, qb_h, qb_i, kb_b, kb_g, kb_j, low_b, high_b, heads, n_i, n_j, KV_GROUP_B
    )
    slope_a, slope_b = None, None
    if SLOPESA is not None:
        slope_a = tl.load(SLOPESA + h).to(tl.float32)
    if SLOPESB is not None:
        slope_b = tl.load(SLOPESB + h).to(tl.float32)
    if BIASA is not None:
        BIASA += bias_a0 + b * bias_ab + h * bias_ah
    if BIASB is not None:
        BIASB += bias_b0 + b * bias_bb + h * bias_bh
    A = SideStream(rows_a, keys_a, ScoreTerms(offset_a, scale_a, slope_a, BIASA, bias_ai, bias_aj))
    B = SideStream(rows_b, keys_b, ScoreTerms(offset_b, scale_b, slope_b, BIASB, bias_bi, bias_bj))
    sums = RowSums(ROW_A + (b * heads + h) * n_i, ROW_B + (b * heads + h) * n_i, GRAD + (b * heads + h) * n_i)
    plain, careful, start, full_start, full_stop = _tiles_to_visit(
        tile, A, B, b, h, FULL_COUNTS, PART_COUNTS, full_b, full_h, full_r, part_b, part_h, part_r,
        I, J, BY_KEYS, ONE_PATTERN,
    )  # fmt: skip
    full_list = b * full_b + h * full_h + tile.to(tl.int64) * full_r
    part_list = b * part_b + h * part_h + tile.to(tl.int64) * part_r
    place = tile * (J if BY_KEYS else I) + tl.arange(0, J if BY_KEYS else I)
    if BY_KEYS:
        own_a, own_b = _load_keys(A.keys, place, da, DA), _load_keys(B.keys, place, db, DB)
        lse_a, lse_b = None, None
    else:
        own_a, lse_a = _load_queries(A.rows, place, da, DA)
        own_b, lse_b = _load_queries(B.rows, place, db, DB)
    # A side that is left out has one number: a function of Triton 3.6 cannot return None.
    out_a, out_b = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    if OUT_A is not None:
        out_a = tl.zeros((J if BY_KEYS else I, DA), tl.float32)
    if OUT_B is not None:
        out_b = tl.zeros((J if BY_KEYS else I, DB), tl.float32)
    for n in range(plain):
        other = tl.load(FULL + full_list + n) if FULL is not None else full_start + n
        out_a, out_b = _add_gradients(
            out_a, out_b, A, B, own_a, own_b, lse_a, lse_b, sums, tile, other, None, n_j,
            da, db, I, J, DA, DB, CAP_A, CAP_B, PRECISION, KIND, OUT_A is not None, OUT_B is not None, BY_KEYS, False,
        )  # fmt: skip
    for n in tl.range(careful, num_stages=1):
        if FULL is not None:
            other = tl.load(PART + part_list + n)
            bits = BITS + tl.load(BITS_INDEX + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            other = tl.where(n < ahead, start + n, full_stop + n - ahead)
            bits = None
        out_a, out_b = _add_gradients(
            out_a, out_b, A, B, own_a, own_b, lse_a, lse_b, sums, tile, other, bits, n_j,
            da, db, I, J, DA, DB, CAP_A, CAP_B, PRECISION, KIND, OUT_A is not None, OUT_B is not None, BY_KEYS, True,
        )  # fmt: skip
    count = n_j if BY_KEYS else n_i
    if OUT_A is not None:
        _store_gradient(OUT_A, out_a * scale_a, b * heads + h, place, count, da, DA)
    if OUT_B is not None:
        _store_gradient(OUT_B, out_b * scale_b, b * heads + h, place, count, db, DB)


@triton.jit
def _add_gradients(
    out_a, out_b, A, B, own_a, own_b, lse_a, lse_b, sums, tile, other, BITS, n_j,
    da: tl.constexpr,
    db: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    CAP_A: tl.constexpr,
    CAP_B: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    WITH_A: tl.constexpr,
    WITH_B: tl.constexpr,
    BY_KEYS: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return both outputs + dL/ds of one tile times its keys, or dL/ds.T times its queries if BY_KEYS."""
    if BY_KEYS:
        row = other * I + tl.arange(0, I)
        x_a, lse_a = _load_queries(A.rows, row, da, DA)
        x_b, lse_b = _load_queries(B.rows, row, db, DB)
        t_a = _log2_tile(A, x_a, own_a, lse_a, other, tile, BITS, I, J, True, CAP_A, PRECISION, CAREFUL)
        t_b = _log2_tile(B, x_b, own_b, lse_b, other, tile, BITS, I, J, True, CAP_B, PRECISION, CAREFUL)
    else:
        row = tile * I + tl.arange(0, I)
        col = other * J + tl.arange(0, J)
        x_a, x_b = _load_keys(A.keys, col, da, DA), _load_keys(B.keys, col, db, DB)
        t_a = _log2_tile(A, own_a, x_a, lse_a, tile, other, BITS, I, J, False, CAP_A, PRECISION, CAREFUL)
        t_b = _log2_tile(B, own_b, x_b, lse_b, tile, other, BITS, I, J, False, CAP_B, PRECISION, CAREFUL)
    at = row[None, :] if BY_KEYS else row[:, None]
    grad = tl.load(sums.grad + at, mask=at < A.rows.n_i, other=0.0)
    sum_a = tl.load(sums.a + at, mask=at < A.rows.n_i, other=0.0)
    sum_b = tl.load(sums.b + at, mask=at < A.rows.n_i, other=0.0)
    weight_a, weight_b, _, by_a, by_b = _entries(t_a, t_b, n_j, KIND)
    if WITH_A:
        # A row of infinite divergence has gradient 0, and 0 times inf is NaN.
        w = tl.where(grad == 0, 0.0, grad * (by_a - weight_a * sum_a))
        if CAREFUL and not BY_KEYS:
            # A key that no row of the tile sees may hold NaN, and 0 times NaN is NaN.
            x_a = tl.where((tl.max(weight_a, 0) > 0)[:, None], x_a, 0.0)
        out_a += tl.dot(w.to(x_a.dtype), x_a, input_precision=PRECISION)
    if WITH_B:
        w = tl.where(grad == 0, 0.0, grad * (by_b - weight_b * sum_b))
        if CAREFUL and not BY_KEYS:
            x_b = tl.where((tl.max(weight_b, 0) > 0)[:, None], x_b, 0.0)
        out_b += tl.dot(w.to(x_b.dtype), x_b, input_precision=PRECISION)
    return out_a, out_b


@triton.jit
def _store_gradient(OUT, out, bh, place, count, d: tl.constexpr, D: tl.constexpr):
    feature = tl.arange(0, D)
    into = OUT + (bh * count + place.to(tl.int64)[:, None]) * d + feature[None, :]
    tl.store(into, out.to(OUT.dtype.element_ty), mask=(place < count)[:, None] & (feature < d)[None, :])


class DivergenceConfig(NamedTuple):
    """Rows and keys per tile, warps, and pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int


def divergence_config(d: int, dtype: torch.dtype, gradient: bool) -> DivergenceConfig:
    """Return a config whose tiles fit in shared memory and registers for sides at most d wide."""
    if dtype == torch.float32 or d > 128:
        return DivergenceConfig(32, 32, 4, 2)
    if gradient:
        return DivergenceConfig(64, 64, 4, 2)
    return DivergenceConfig(128, 64, 8, 3)


class Matrix(NamedTuple):
    """One of the two attention matrices: queries `b h i d`, keys `b g j d`, the log-sum-exp `b h i`, and its terms."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    offset: int
    cap: float | None = None
    pattern: Pattern = ALL_VISIBLE
    bias: KernelBias = NO_BIAS

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """b h i j."""
        return *self.q.shape[:3], self.k.shape[2]

    def with_kernel_layout(self) -> Matrix:
        """Return the same matrix, every tensor as the kernels read it."""
        q, k = with_contiguous_features(self.q), with_contiguous_features(self.k)
        return self._replace(q=q, k=k, lse=self.lse.contiguous())


def _arguments(A: Matrix, B: Matrix, config: DivergenceConfig) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the tensors, the numbers and the constants that both kernels share."""
    b, h, n_i, n_j = A.shape
    tensors: list[Any] = []
    numbers: list[Any] = []
    for side in (A, B):
        values = side.bias.values
        steps: tuple[int, ...] = side.bias.steps or (0, 0, 0, 0)
        if values is not None and side.bias.steps is None:
            values = values.expand(b, h, n_i, n_j)
            steps = values.stride()
        tensors += [side.q, side.k, side.lse, side.pattern.lengths, side.bias.slopes, values]
        numbers += [*side.q.stride()[:3], *side.k.stride()[:3], side.bias.origin, *steps]
        numbers += [side.scale, side.offset, side.pattern.low, side.pattern.high]
    lists = A.pattern.lists
    tensors += [None] * 6 if lists is None else lists
    numbers += [0] * 6 if lists is None else [*list_strides(lists.full), *list_strides(lists.part)]
    constants: dict[str, Any] = {
        "da": A.q.shape[-1],
        "db": B.q.shape[-1],
        "KV_GROUP_A": h // A.k.shape[1],
        "KV_GROUP_B": h // B.k.shape[1],
        "I": config.rows,
        "J": config.cols,
        "DA": padded_width(A.q.shape[-1]),
        "DB": padded_width(B.q.shape[-1]),
        "CAP_A": A.cap,
        "CAP_B": B.cap,
        "PRECISION": dot_precision(A.q.dtype),
    }
    return tensors, numbers, constants


class RowDivergences(NamedTuple):
    """The divergences D_i of the module docstring and, for a backward, their sums a_i and b_i: `b h i`, float32."""

    value: Tensor
    row_a: Tensor | None
    row_b: Tensor | None


def row_divergences(kind: str, A: Matrix, B: Matrix, *, one_pattern: bool, with_sums: bool) -> RowDivergences:
    """Return "kl", "js", "mse" or "dot" of each row, of two matrices with the same b h i j and dtype.

    `one_pattern` says that both sides have the same offset and pattern; else each must be a band and lengths.
    """
    A, B = A.with_kernel_layout(), B.with_kernel_layout()
    b, h, n_i, n_j = A.shape
    value, *sums = (torch.zeros(b, h, n_i, device=A.q.device) for _ in range(3 if with_sums else 1))
    found = RowDivergences(value, *(sums or (None, None)))
    if not (b and n_i and n_j):
        return found
    config = divergence_config(max(A.q.shape[-1], B.q.shape[-1]), A.q.dtype, gradient=False)
    tensors, numbers, constants = _arguments(A, B, config)
    tiles = -(-n_i // config.rows)
    launch(
        _divergence_kernel, (tiles * b * h,), *tensors, *found, *numbers, h, n_i, n_j, tiles,
        **constants,
        KIND=kind,
        ONE_PATTERN=one_pattern,
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return found


def divergence_gradients(
    kind: str,
    A: Matrix,
    B: Matrix,
    sums: RowSums,
    *,
    one_pattern: bool,
    by_keys: bool,
    out_dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the queries of both sides, `b h i d`, or of their keys for each head, `b h j d`.

    Lists in the patterns are cut by `divergence_config(..., gradient=True)`, by rows or by keys. A side whose dtype is
    None is left out.
    """
    A, B = A.with_kernel_layout(), B.with_kernel_layout()
    b, h, n_i, n_j = A.shape
    out = [
        None
        if dtype is None
        else torch.zeros(b, h, n_j if by_keys else n_i, side.q.shape[-1], device=side.q.device, dtype=dtype)
        for side, dtype in zip((A, B), out_dtypes, strict=True)
    ]
    if not (b and n_i and n_j):
        return out[0], out[1]
    config = divergence_config(max(A.q.shape[-1], B.q.shape[-1]), A.q.dtype, gradient=True)
    tensors, numbers, constants = _arguments(A, B, config)
    tiles = -(-n_j // config.cols) if by_keys else -(-n_i // config.rows)
    launch(
        _gradient_kernel, (tiles * b * h,),
        *tensors, *(x.contiguous() for x in sums), *out, *numbers, h, n_i, n_j, tiles,
        **constants,
        KIND=kind,
        ONE_PATTERN=one_pattern,
        BY_KEYS=by_keys,
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return out[0], out[1]
