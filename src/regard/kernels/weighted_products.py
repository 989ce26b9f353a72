"""Products with softmax attention weights that are never stored, or with their gradient, from the row statistic.

    W_ij = A_ij * (key_j - row_i - slope_i ln A_ij)          A_ij = exp(s_ij - lse_i); without the three, W = A
    by_rows: out_i = sum_j W_ij x_j                          by_keys: out_j = sum_i W_ij x_i

A.T @ x is `by_keys` with W = A. With entropy H_i = -sum_j A ln A, received R_j = sum_i A and gradients h_i, r_j,
dL/ds_ij = A_ij (r_j - sum_j' A r - h_i (ln A_ij + H_i)): the W above with key = r, row = A r + h H and slope = h, and
the gradients of q and k are these two products with k and with q.

Cost: N x N x (d + e) multiply-adds on the visible tiles, O(N) memory. Widths of q and x up to 256.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_cache import launch
from .tiles import EVERYTHING, LN2, LOG2E, NEVER, NOTHING, Bias, Pattern, band, log2_weights, padded, ready, strides


@triton.jit
def _gather(
    Q, K, LSE, X, OUT, KEY, ROW, SLOPE, LENGTHS, SLOPES, BIAS, FULL_COUNTS, FULL, PART_COUNTS, PART, WHERE, BITS,
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
    """A program keeps a tile of rows and walks keys; BY_KEYS, it keeps a tile of keys and walks rows."""
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
            # The row at r sees the key at j if low <= r + offset - j <= high: a band of rows for each key.
            first, last = tile * J - offset, tl.minimum(tile * J + J, length) - 1 - offset
            start, stop, full_start, full_stop, _, _ = band(first, last, -high, -low, n_i, I)
            ragged = tile * J + J > length
            stop = tl.where(tile * J < length, stop, start)
            full_stop = tl.where(ragged, full_start, full_stop)
        else:
            first, last = tile * I + offset, tl.minimum(tile * I + I, n_i) - 1 + offset
            start, stop, full_start, full_stop, _, _ = band(first, last, low, high, length, J)
        plain = full_stop - full_start
        careful = stop - start - plain
    out = tl.zeros((J if BY_KEYS else I, E), tl.float32)
    for n in range(plain):
        other = tl.load(full_list + n) if FULL is not None else full_start + n
        out = _add(
            out, other if BY_KEYS else tile, tile if BY_KEYS else other, Q, K, LSE, X, KEY, ROW, SLOPE, BIAS, None,
            slope, q_i, k_j, x_n, bias_i, bias_j, scale, offset, low, high, n_i, n_j, length,
            d, e, I, J, D, E, BY_KEYS, CAP, False, PRECISION, X_PRECISION,
        )  # fmt: skip
    for n in range(careful):
        if FULL is not None:
            other = tl.load(PART + part_list + n)
            bits = BITS + tl.load(WHERE + part_list + n).to(tl.int64) * (I * J // 32)
        else:
            ahead = full_start - start
            other = tl.where(n < ahead, start + n, full_stop + n - ahead)
            bits = None
        out = _add(
            out, other if BY_KEYS else tile, tile if BY_KEYS else other, Q, K, LSE, X, KEY, ROW, SLOPE, BIAS, bits,
            slope, q_i, k_j, x_n, bias_i, bias_j, scale, offset, low, high, n_i, n_j, length,
            d, e, I, J, D, E, BY_KEYS, CAP, True, PRECISION, X_PRECISION,
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
def _add(
    out, row_tile, col_tile, Q, K, LSE, X, KEY, ROW, SLOPE, BIAS, BITS, slope, q_i, k_j, x_n, bias_i, bias_j,
    scale, offset, low, high, n_i, n_j, length,
    d: tl.constexpr,
    e: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BY_KEYS: tl.constexpr,
    CAP: tl.constexpr,
    CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
    X_PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of W against its part of x. BY_KEYS the tile is that of W.T."""
    local_row, local_col = tl.arange(0, I), tl.arange(0, J)
    row, col = row_tile * I + local_row, col_tile * J + local_col
    feature, wide = tl.arange(0, D), tl.arange(0, E)
    q = tl.load(
        Q + row.to(tl.int64)[:, None] * q_i + feature[None, :],
        mask=(row < n_i)[:, None] & (feature < d)[None, :],
        other=0.0,
    )
    k = tl.load(
        K + col.to(tl.int64)[:, None] * k_j + feature[None, :],
        mask=(col < n_j)[:, None] & (feature < d)[None, :],
        other=0.0,
    )
    lse = tl.load(LSE + row, mask=row < n_i, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), -NEVER, lse * LOG2E)
    if BY_KEYS:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        lse2, at_row, at_col = lse2[None, :], row[None, :], col[:, None]
        local_row, local_col = local_row[None, :], local_col[:, None]
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        lse2, at_row, at_col = lse2[:, None], row[:, None], col[None, :]
        local_row, local_col = local_row[:, None], local_col[None, :]
    t = log2_weights(
        s, lse2, at_row, at_col, offset, scale, slope, BIAS, bias_i, bias_j, n_i, length, low, high, BITS,
        local_row, local_col, J, CAP, CAREFUL,
    )  # fmt: skip
    w = tl.exp2(t)
    if KEY is not None:
        by_key = tl.load(KEY + at_col, mask=at_col < n_j, other=0.0)
        by_row = tl.load(ROW + at_row, mask=at_row < n_i, other=0.0)
        tilt = tl.load(SLOPE + at_row, mask=at_row < n_i, other=0.0)
        w = w * (by_key - by_row - tilt * LN2 * t)
    if BY_KEYS:
        place, count = row, n_i
    else:
        place, count = col, n_j
    x = tl.load(
        X + place.to(tl.int64)[:, None] * x_n + wide[None, :],
        mask=(place < count)[:, None] & (wide < e)[None, :],
        other=0.0,
    )
    if not BY_KEYS:
        # What a key holds that no row of the tile sees must not come in as 0 times it.
        x = tl.where((tl.max(w, 0) != 0)[:, None] | (tl.min(w, 0) != 0)[:, None], x, 0.0)
    return out + tl.dot(w.to(x.dtype), x, input_precision=X_PRECISION)


class Tilt(NamedTuple):
    """What W holds beside A: `b h j`, `b h i` and `b h i`, float32."""

    key: Tensor
    row: Tensor
    slope: Tensor


class Config(NamedTuple):
    """Rows and keys of a tile, warps, and tiles under way at once."""

    rows: int
    cols: int
    warps: int
    stages: int


def config(d: int, e: int, dtype: torch.dtype) -> Config:
    """A cut whose tiles fit the widths."""
    return Config(32, 32, 4, 2) if dtype == torch.float32 or max(d, e) > 128 else Config(64, 64, 4, 2)


def by_rows(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    x: Tensor,
    *,
    scale: float,
    offset: int,
    cap: float | None = None,
    pattern: Pattern = EVERYTHING,
    bias: Bias = NOTHING,
    tilt: Tilt | None = None,
) -> Tensor:
    """sum_j W_ij x_j in float32: `b h i d, b g j d, b h i, b x j e -> b h i e`; lists in `pattern` by rows."""
    return _product(q, k, lse, x, False, scale, offset, cap, pattern, bias, tilt)


def by_keys(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    x: Tensor,
    *,
    scale: float,
    offset: int,
    cap: float | None = None,
    pattern: Pattern = EVERYTHING,
    bias: Bias = NOTHING,
    tilt: Tilt | None = None,
) -> Tensor:
    """sum_i W_ij x_i in float32: `b h i d, b g j d, b h i, b x i e -> b h j e`; lists in `pattern` by keys."""
    return _product(q, k, lse, x, True, scale, offset, cap, pattern, bias, tilt)


def _product(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    x: Tensor,
    keys: bool,
    scale: float,
    offset: int,
    cap: float | None,
    pattern: Pattern,
    bias: Bias,
    tilt: Tilt | None,
) -> Tensor:
    q, k, x, lse = ready(q), ready(k), ready(x), lse.contiguous()
    b, h, n_i, d = q.shape
    g, n_j = k.shape[1:3]
    e = x.shape[-1]
    out = torch.zeros(b, h, n_j if keys else n_i, e, device=q.device)
    if not (b and n_i and n_j and e):
        return out
    cut = config(d, e, torch.promote_types(q.dtype, x.dtype))
    tiles = -(-n_j // cut.cols) if keys else -(-n_i // cut.rows)
    lists, values = pattern.lists, bias.values
    steps: tuple[int, ...] = bias.steps or (0, 0, 0, 0)
    if values is not None and bias.steps is None:
        values = values.expand(b, h, n_i, n_j)
        steps = values.stride()
    tilts = (None,) * 3 if tilt is None else tuple(part.contiguous() for part in tilt)
    launch(
        _gather, (tiles * b * h,),
        q, k, lse, x, out, *tilts, pattern.lengths, bias.slopes, values,
        *((None,) * 6 if lists is None else lists),
        *q.stride()[:3], *k.stride()[:3], *x.stride()[:3], bias.origin, *steps,
        *((0,) * 6 if lists is None else (*strides(lists.full), *strides(lists.part))),
        scale, offset, pattern.low, pattern.high, h, n_i, n_j, tiles,
        d=d,
        e=e,
        KV_GROUP=h // g,
        X_GROUP=h // x.shape[1],
        I=cut.rows,
        J=cut.cols,
        D=padded(d),
        E=padded(e),
        BY_KEYS=keys,
        CAP=cap,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        X_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip
    return out
