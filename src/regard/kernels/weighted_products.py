"""Products with softmax attention weights that are never stored, or with their gradient, from the row statistic.

    W_ij = A_ij * (key_j - row_i - slope_i ln A_ij)          A_ij = exp(s_ij - lse_i); without the three, W = A
    product_by_rows: out_i = sum_j W_ij x_j                  product_by_keys: out_j = sum_i W_ij x_i

A.T @ x is `product_by_keys` with W = A. With entropy H_i = -sum_j A ln A, received R_j = sum_i A and gradients h_i,
r_j, dL/ds_ij = A_ij (r_j - sum_j' A r - h_i (ln A_ij + H_i)): the W above with key = r, row = A r + h H and slope = h,
and the gradients of q and k are these two products with k and with q.

Cost: N x N x (d + e) multiply-adds on the visible tiles, O(N) memory. Limits: widths of q and x up to 256.
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
    """The numbers beside A in W, float32: `b h j`, `b h i` and `b h i`; inside the kernel, pointers or None."""

    key: Any
    row: Any
    slope: Any


@triton.jit
def _weighted_product_kernel(
    Q, K, LSE, X, OUT, KEY, ROW, SLOPE, LENGTHS, SLOPES, BIAS, FULL_COUNTS, FULL, PART_COUNTS, PART, BITS_INDEX, BITS,
    q_b, q_h, q_i, k_b, k_g, k_j, x_b, x_h, x_n, bias_0, bias_b, bias_h, bias_i, bias_j,
    full_b, full_h, full_r, part_b, part_h, part_r, scale, offset, low, high, heads, n_i, n_j, tiles,
    d: tl.constexpr,
    e: tl.constexpr,
    KV_GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BY_KEYS: tl.constexpr,
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
    K += b * k_b + (h // KV_GROUP) * k_g
    X += b * x_b + (h // X_GROUP) * x_h
    LSE += (b * heads + h) * n_i
    length = n_j
    if LENGTHS is not None:
        length = tl.minimum(n_j, tl.load(LENGTHS + b))
    slope = None
    if SLOPES is not None:
        slope = tl.load(SLOPES + h).to(tl.float32)
    if BIAS is not None:
        BIAS += bias_0 + b * bias_b + h * bias_h
    if KEY is not None:
        KEY += (b * heads + h) * n_j
        ROW += (b * heads + h) * n_i
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
    for n in range(plain):
        other = tl.load(full_list + n) if FULL is not None else full_start + n
        out = _add_tile(
            out, other if BY_KEYS else tile, tile if BY_KEYS else other, rows, keys, factor, terms, gradient, None,
            d, e, I, J, D, E, BY_KEYS, CAP, PRECISION, X_PRECISION, False,
        )  # fmt: skip
    for n in range(careful):
        if FULL is not None:
            other = tl.load(PART + part_list + n)
            bits = BITS + tl.load(BITS_INDEX + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            other = tl.where(n < ahead, start + n, full_stop + n - ahead)
            bits = None
        out = _add_tile(
            out, other if BY_KEYS else tile, tile if BY_KEYS else other, rows, keys, factor, terms, gradient, bits,
            d, e, I, J, D, E, BY_KEYS, CAP, PRECISION, X_PRECISION, True,
        )  # fmt: skip
    feature = tl.arange(0, E)
    if BY_KEYS:
        place = tile * J + tl.arange(0, J)
        count = n_j
    else:
        place = tile * I + tl.arange(0, I)
        count = n_i
    into = OUT + ((b * heads + h) * count + place.to(tl.int64)[:, None]) * e + feature[None, :]
    tl.store(into, out, mask=(place < count)[:, None] & (feature < e)[None, :])


@triton.jit
def _add_tile(
    out, row_tile, col_tile, rows, keys, factor, terms, gradient, BITS,
    d: tl.constexpr,
    e: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BY_KEYS: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    X_PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return out + one tile of W times its rows of x; the tile is one of W.T if BY_KEYS."""
    local_row, local_col = tl.arange(0, I), tl.arange(0, J)
    row, col = row_tile * I + local_row, col_tile * J + local_col
    feature, wide = tl.arange(0, D), tl.arange(0, E)
    q = tl.load(
        rows.Q + row.to(tl.int64)[:, None] * rows.q_i + feature[None, :],
        mask=(row < rows.n_i)[:, None] & (feature < d)[None, :],
        other=0.0,
    )
    k = tl.load(
        keys.K + col.to(tl.int64)[:, None] * keys.k_j + feature[None, :],
        mask=(col < keys.n_j)[:, None] & (feature < d)[None, :],
        other=0.0,
    )
    lse = tl.load(rows.LSE + row, mask=row < rows.n_i, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), -LOG2_ZERO, lse * LOG2E)
    if BY_KEYS:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        lse2, at_row, at_col = lse2[None, :], row[None, :], col[:, None]
        local_row, local_col = local_row[None, :], local_col[:, None]
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        lse2, at_row, at_col = lse2[:, None], row[:, None], col[None, :]
        local_row, local_col = local_row[:, None], local_col[None, :]
    t = log2_weights(
        s, lse2, at_row, at_col, terms.offset, terms.scale, terms.slope, terms.BIAS, terms.bias_i, terms.bias_j,
        rows.n_i, keys.length, keys.low, keys.high, BITS, local_row, local_col, J, CAP, CAREFUL,
    )  # fmt: skip
    w = tl.exp2(t)
    if gradient.key is not None:
        by_key = tl.load(gradient.key + at_col, mask=at_col < keys.n_j, other=0.0)
        by_row = tl.load(gradient.row + at_row, mask=at_row < rows.n_i, other=0.0)
        slope = tl.load(gradient.slope + at_row, mask=at_row < rows.n_i, other=0.0)
        w = w * (by_key - by_row - slope * LN2 * t)
    if BY_KEYS:
        place, count = row, rows.n_i
    else:
        place, count = col, keys.n_j
    x = tl.load(
        factor.X + place.to(tl.int64)[:, None] * factor.x_n + wide[None, :],
        mask=(place < count)[:, None] & (wide < e)[None, :],
        other=0.0,
    )
    if not BY_KEYS:
        # A key that no row of the tile sees may hold NaN, and 0 times NaN is NaN.
        x = tl.where((tl.max(w, 0) != 0)[:, None] | (tl.min(w, 0) != 0)[:, None], x, 0.0)
    return out + tl.dot(w.to(x.dtype), x, input_precision=X_PRECISION)


class ProductConfig(NamedTuple):
    """Rows and keys per tile, warps, and pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int


def product_config(d: int, e: int, dtype: torch.dtype) -> ProductConfig:
    """Return a config whose tiles fit in shared memory for queries d wide and x e wide."""
    return ProductConfig(32, 32, 4, 2) if dtype == torch.float32 or max(d, e) > 128 else ProductConfig(64, 64, 4, 2)


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
) -> Tensor:
    q, k, x = (with_contiguous_features(tensor) for tensor in (q, k, x))
    lse = lse.contiguous()
    b, h, n_i, d = q.shape
    g, n_j = k.shape[1:3]
    e = x.shape[-1]
    out = torch.zeros(b, h, n_j if by_keys else n_i, e, device=q.device)
    if not (b and n_i and n_j and e):
        return out
    config = product_config(d, e, torch.promote_types(q.dtype, x.dtype))
    tiles = -(-n_j // config.cols) if by_keys else -(-n_i // config.rows)
    lists, values = pattern.lists, bias.values
    steps: tuple[int, ...] = bias.steps or (0, 0, 0, 0)
    if values is not None and bias.steps is None:
        values = values.expand(b, h, n_i, n_j)
        steps = values.stride()
    gradient_inputs = (None,) * 3 if gradient is None else tuple(part.contiguous() for part in gradient)
    launch(
        _weighted_product_kernel, (tiles * b * h,),
        q, k, lse, x, out, *gradient_inputs, pattern.lengths, bias.slopes, values,
        *((None,) * 6 if lists is None else lists),
        *q.stride()[:3], *k.stride()[:3], *x.stride()[:3], bias.origin, *steps,
        *((0,) * 6 if lists is None else (*list_strides(lists.full), *list_strides(lists.part))),
        scale, offset, pattern.low, pattern.high, h, n_i, n_j, tiles,
        d=d,
        e=e,
        KV_GROUP=h // g,
        X_GROUP=h // x.shape[1],
        I=config.rows,
        J=config.cols,
        D=padded_width(d),
        E=padded_width(e),
        BY_KEYS=by_keys,
        CAP=cap,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        X_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
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
) -> Tensor:
    """Return sum_j W_ij x_j in float32: `b h i d, b g j d, b h i, b x j e -> b h i e`; lists in `pattern` by rows."""
    return _product(q, k, lse, x, False, scale, offset, cap, pattern, bias, gradient)


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
) -> Tensor:
    """Return sum_i W_ij x_i in float32: `b h i d, b g j d, b h i, b x i e -> b h j e`; lists in `pattern` by keys."""
    return _product(q, k, lse, x, True, scale, offset, cap, pattern, bias, gradient)
