"""Products with softmax attention weights that are never stored, or with their gradient, from the row statistic.

    W_ij = A_ij * (key_j - row_i), or A_ij * -slope_i * (row_i + ln A_ij)     A_ij = exp(s_ij - lse_i); alone, W = A
    product_by_rows: out_i = sum_j W_ij x_j                                    product_by_keys: out_j = sum_i W_ij x_i

A.T @ x is `product_by_keys` with W = A. With entropy H_i = -sum_j A ln A, received R_j = sum_i A and gradients h_i,
r_j, dL/ds_ij = A_ij (r_j - sum_j' A r - h_i (ln A_ij + H_i)): for received mass the first W above with key = r and
row = A r, for entropy the second with row = H and slope = h. The gradients of q and k are these two products with k and
with q.

A program loads its own rows (of queries, or of keys) once and loops over the others.

Cost: N x N x (d + e) multiply-adds on the visible tiles, O(N) memory. Limits: widths of q and x up to 256.
"""

from __future__ import annotations

from functools import lru_cache
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


class FactorStream(NamedTuple):
    """Inside the kernel: x for one head."""

    X: Any
    x_n: Any


class GradientTerms(NamedTuple):
    """The numbers beside A in W, float32: `b h j`, `b h i` and `b h i`; inside the kernel, pointers or None.

    There is a key or a slope.
    """

    key: Any
    row: Any
    slope: Any


class OwnTile(NamedTuple):
    """Inside the kernel: the rows of queries, or of keys, that a program keeps."""

    tile: Any
    lse2: Any  # log2 of each query's sum of exponentials, or None
    key: Any  # the part of `GradientTerms` that belongs to these rows, or None
    row: Any
    slope: Any


# Numbers that change with the length or the mask: a kernel is not compiled again if they are 1 or multiples of 16.
LENGTHS_AND_SIZES = [
    *("full_b", "full_h", "full_r", "part_b", "part_h", "part_r", "offset", "low", "high", "heads", "kv_group"),
    *("x_group", "n_i", "n_j", "tiles"),
]


@triton.jit(do_not_specialize=LENGTHS_AND_SIZES)
def _weighted_product_kernel(
    Q, K, LSE, X, OUT, KEY, ROW, SLOPE, LENGTHS, SLOPES, BIAS, FULL_COUNTS, FULL, PART_COUNTS, PART, BITS_INDEX, BITS,
    q_b, q_h, q_i, k_b, k_g, k_j, x_b, x_h, x_n, bias_0, bias_b, bias_h, bias_i, bias_j,
    full_b, full_h, full_r, part_b, part_h, part_r, scale, offset, low, high, heads, kv_group, x_group, n_i, n_j, tiles,
    times,  # the output is multiplied by it
    d: tl.constexpr,
    e: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BY_KEYS: tl.constexpr,
    SAME: tl.constexpr,  # x is k, or q if BY_KEYS
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    X_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute W x; if BY_KEYS, W.T x. W is the matrix of the module docstring, `i j` in each head.

    Each program computes one tile of output rows: for I queries it loops over the visible tiles of keys, or, if
    BY_KEYS, for J keys over the tiles of queries.
    """
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    Q += b * q_b + h * q_h
    K += b * k_b + (h // kv_group) * k_g
    X += b * x_b + (h // x_group) * x_h
    LSE += (b * heads + h) * n_i
    length = n_j
    if LENGTHS is not None:
        length = tl.minimum(n_j, tl.load(LENGTHS + b))
    slope = None
    if SLOPES is not None:
        slope = tl.load(SLOPES + h).to(tl.float32)
    if BIAS is not None:
        BIAS += bias_0 + b * bias_b + h * bias_h
    if ROW is not None:
        ROW += (b * heads + h) * n_i
    if KEY is not None:
        KEY += (b * heads + h) * n_j
    if SLOPE is not None:
        SLOPE += (b * heads + h) * n_i
    part_list = tl.zeros((), tl.int64)
    if FULL is not None:
        part_list += b * part_b + h * part_h + tile.to(tl.int64) * part_r
        full_list = FULL + b * full_b + h * full_h + tile.to(tl.int64) * full_r
        plain = tl.load(FULL_COUNTS + (b * full_b + h * full_h) // full_r + tile)
        careful = tl.load(PART_COUNTS + (b * part_b + h * part_h) // part_r + tile)
        start, full_start, full_stop = 0, 0, 0
    else:
        if BY_KEYS:
            # The row at r sees the key at j if low <= r + offset - j <= high, which is a band of rows for each key.
            first, last = tile * J - offset, tl.minimum(tile * J + J, length) - 1 - offset
            start, stop, full_start, full_stop, _, _ = visible_tiles(first, last, -high, -low, n_i, I)
            ragged = tile * J + J > length
            stop = tl.where(tile * J < length, stop, start)
            full_stop = tl.where(ragged, full_start, full_stop)
        else:
            first, last = tile * I + offset, tl.minimum(tile * I + I, n_i) - 1 + offset
            start, stop, full_start, full_stop, _, _ = visible_tiles(first, last, low, high, length, J)
        plain = full_stop - full_start
        careful = stop - start - plain
    out = tl.zeros((J if BY_KEYS else I, E), tl.float32)
    rows = RowStream(Q, q_i, LSE, n_i)
    keys = KeyStream(K, k_j, length, n_j, low, high)
    factor = FactorStream(X, x_n)
    terms = ScoreTerms(offset, scale, slope, BIAS, bias_i, bias_j)
    gradient = GradientTerms(KEY, ROW, SLOPE)
    own_lse2, own_key, own_row, own_slope = None, None, None, None
    if BY_KEYS:
        place, count = tile * J + tl.arange(0, J), n_j
        own = _load_rows(K, place, k_j, n_j, d, D, True)
        if KEY is not None:
            own_key = tl.load(KEY + place, mask=place < n_j, other=0.0)[:, None]
    else:
        place, count = tile * I + tl.arange(0, I), n_i
        own = _load_rows(Q, place, q_i, n_i, d, D, True)
        own_lse2 = _load_lse2(LSE, place, n_i)[:, None]
        if ROW is not None:
            own_row = tl.load(ROW + place, mask=place < n_i, other=0.0)[:, None]
        if SLOPE is not None:
            own_slope = tl.load(SLOPE + place, mask=place < n_i, other=0.0)[:, None]
    own = OwnTile(own, own_lse2, own_key, own_row, own_slope)
    for n in range(plain):
        other = tl.load(full_list + n) if FULL is not None else full_start + n
        out = _add_tile(
            out, own, other if BY_KEYS else tile, tile if BY_KEYS else other, rows, keys, factor, terms, gradient, None,
            d, e, I, J, D, E, BY_KEYS, SAME, CAP, PRECISION, X_PRECISION, FULL is not None, False,
        )  # fmt: skip
    for n in tl.range(careful, num_stages=1):
        if FULL is not None:
            other = tl.load(PART + part_list + n)
            bits = BITS + tl.load(BITS_INDEX + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            other = tl.where(n < ahead, start + n, full_stop + n - ahead)
            bits = None
        out = _add_tile(
            out, own, other if BY_KEYS else tile, tile if BY_KEYS else other, rows, keys, factor, terms, gradient, bits,
            d, e, I, J, D, E, BY_KEYS, SAME, CAP, PRECISION, X_PRECISION, True, True,
        )  # fmt: skip
    feature = tl.arange(0, E)
    into = OUT + ((b * heads + h) * count + place.to(tl.int64)[:, None]) * e + feature[None, :]
    tl.store(into, (out * times).to(OUT.dtype.element_ty), mask=(place < count)[:, None] & (feature < e)[None, :])


@triton.jit
def _load_rows(X, place, step, n, d: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr):
    """Return rows of a matrix, `rows D`, 0 past its width; and past its end, which only RAGGED tiles cross."""
    feature = tl.arange(0, D)
    at = X + place.to(tl.int64)[:, None] * step + feature[None, :]
    if RAGGED:
        x = tl.load(at, mask=(place < n)[:, None] & (feature < d)[None, :], other=0.0)
    elif d < D:
        x = tl.load(at, mask=(feature < d)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _load_lse2(LSE, row, n_i):
    """Return log2 of each query's sum of exponentials; rows that see nothing get an infinite sum."""
    lse = tl.load(LSE + row, mask=row < n_i, other=float("-inf"))
    return tl.where(lse == float("-inf"), -LOG2_ZERO, lse * LOG2E)


@triton.jit
def _add_tile(
    out, own, row_tile, col_tile, rows, keys, factor, terms, gradient, BITS,
    d: tl.constexpr,
    e: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BY_KEYS: tl.constexpr,
    SAME: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    X_PRECISION: tl.constexpr,
    RAGGED: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return out + one tile of W times its rows of x; the tile is one of W.T if BY_KEYS."""
    local_row, local_col = tl.arange(0, I), tl.arange(0, J)
    row, col = row_tile * I + local_row, col_tile * J + local_col
    if BY_KEYS:
        place, count = row, rows.n_i
        other = _load_rows(rows.Q, row, rows.q_i, rows.n_i, d, D, RAGGED)
        lse2, at_row, at_col = _load_lse2(rows.LSE, row, rows.n_i)[None, :], row[None, :], col[:, None]
        local_row, local_col = local_row[None, :], local_col[:, None]
    else:
        place, count = col, keys.n_j
        other = _load_rows(keys.K, col, keys.k_j, keys.n_j, d, D, RAGGED)
        lse2, at_row, at_col = own.lse2, row[:, None], col[None, :]
        local_row, local_col = local_row[:, None], local_col[None, :]
    s = tl.dot(own.tile, tl.trans(other), input_precision=PRECISION)
    t = log2_weights(
        s, lse2, at_row, at_col, terms.offset, terms.scale, terms.slope, terms.BIAS, terms.bias_i, terms.bias_j,
        rows.n_i, keys.length, keys.low, keys.high, BITS, local_row, local_col, J, CAP, CAREFUL,
    )  # fmt: skip
    w = tl.exp2(t)
    if gradient.row is not None:
        by_row = tl.load(gradient.row + at_row, mask=at_row < rows.n_i, other=0.0) if BY_KEYS else own.row
        if gradient.slope is not None:
            slope = tl.load(gradient.slope + at_row, mask=at_row < rows.n_i, other=0.0) if BY_KEYS else own.slope
            w = w * (-slope * (by_row + LN2 * t))
        elif BY_KEYS:
            w = w * (own.key - by_row)
        else:
            w = w * (tl.load(gradient.key + at_col, mask=at_col < keys.n_j, other=0.0) - by_row)
    x = other if SAME else _load_rows(factor.X, place, factor.x_n, count, e, E, RAGGED)
    if CAREFUL and not BY_KEYS:
        # A key that no row of the tile sees may hold NaN, and 0 times NaN is NaN.
        x = tl.where((tl.max(w, 0) != 0)[:, None] | (tl.min(w, 0) != 0)[:, None], x, 0.0)
    return out + tl.dot(w.to(x.dtype), x, input_precision=X_PRECISION)


class ProductConfig(NamedTuple):
    """Rows and keys per tile, warps, and pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int


@lru_cache(maxsize=64)
def product_config(d: int, e: int, dtype: torch.dtype) -> ProductConfig:
    """Return the fastest measured config whose tiles fit in shared memory for queries d wide and x e wide.

    On an H200 the gradients of an entropy, 64 heads of 4,096 keys and width 64, took 1.49 ms with 128 rows and 1.98 ms
    with 64; of width 128, 2.88 ms with 64 rows and 4.95 ms with 128 rows and eight warps.
    """
    if dtype == torch.float32 or max(d, e) > 128:
        return ProductConfig(32, 32, 4, 2)
    return ProductConfig(128, 64, 4, 3) if max(d, e) <= 64 else ProductConfig(64, 64, 4, 2)


def _product(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    x: Tensor,
    by_keys: bool,
    scale: float,
    offset: int,
    cap: float | None,
    pattern: Pattern,
    bias: KernelBias,
    gradient: GradientTerms | None,
    times: float,
    dtype: torch.dtype,
) -> Tensor:
    is_same = x is (q if by_keys else k)
    q, k, x = (with_contiguous_features(tensor) for tensor in (q, k, x))
    lse = lse.contiguous()
    b, h, n_i, d = q.shape
    g, n_j = k.shape[1:3]
    e = x.shape[-1]
    shape = b, h, n_j if by_keys else n_i, e
    if not (b and n_i and n_j and e):
        return torch.zeros(shape, device=q.device, dtype=dtype)
    out = torch.empty(shape, device=q.device, dtype=dtype)  # the kernel writes every row
    config = product_config(d, e, torch.promote_types(q.dtype, x.dtype))
    tiles = -(-n_j // config.cols) if by_keys else -(-n_i // config.rows)
    lists, values = pattern.lists, bias.values
    steps: tuple[int, ...] = bias.steps or (0, 0, 0, 0)
    if values is not None and bias.steps is None:
        values = values.expand(b, h, n_i, n_j)
        steps = values.stride()
    terms = (None,) * 3 if gradient is None else tuple(None if x is None else x.contiguous() for x in gradient)
    launch(
        _weighted_product_kernel, (tiles * b * h,),
        q, k, lse, x, out, *terms, pattern.lengths, bias.slopes, values,
        *((None,) * 6 if lists is None else lists),
        *q.stride()[:3], *k.stride()[:3], *x.stride()[:3], bias.origin, *steps,
        *((0,) * 6 if lists is None else (*list_strides(lists.full), *list_strides(lists.part))),
        scale, offset, pattern.low, pattern.high, h, h // g, h // x.shape[1], n_i, n_j, tiles, times,
        d=d,
        e=e,
        I=config.rows,
        J=config.cols,
        D=padded_width(d),
        E=padded_width(e),
        BY_KEYS=by_keys,
        SAME=is_same,
        CAP=cap,
        PRECISION=dot_precision(q.dtype),
        X_PRECISION=dot_precision(x.dtype),
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return out


def product_by_rows(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    x: Tensor,
    *,
    scale: float,
    offset: int,
    cap: float | None = None,
    pattern: Pattern = ALL_VISIBLE,
    bias: KernelBias = NO_BIAS,
    gradient: GradientTerms | None = None,
    times: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return times sum_j W_ij x_j: `b h i d, b g j d, b h i, b x j e -> b h i e`; lists in `pattern` by rows."""
    return _product(q, k, lse, x, False, scale, offset, cap, pattern, bias, gradient, times, dtype)


def product_by_keys(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    x: Tensor,
    *,
    scale: float,
    offset: int,
    cap: float | None = None,
    pattern: Pattern = ALL_VISIBLE,
    bias: KernelBias = NO_BIAS,
    gradient: GradientTerms | None = None,
    times: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return times sum_i W_ij x_i: `b h i d, b g j d, b h i, b x i e -> b h j e`; lists in `pattern` by keys."""
    return _product(q, k, lse, x, True, scale, offset, cap, pattern, bias, gradient, times, dtype)
