"""Additive attention scores u . tanh(q_i + k_j) for all pairs, and their gradients, without a tanh per pair.

With E = exp(2 q) and F = exp(2 k), computed once per token, x_f = 1 + E_if F_jf and R_f = 1 / x_f,

    tanh(q_if + k_jf) = 1 - 2 R_f        s_ij = sum_f u_f - 2 sum_f u_f R_f        tanh' = 4 (R_f - R_f^2)

and four features share one reciprocal: u1/x1 + u2/x2 + u3/x3 + u4/x4 over x1 x2 x3 x4. That is 3.5 multiply-adds and a
quarter of a reciprocal per feature, where tanh takes one special function each.

The product of four x must stay finite. There are three modes, chosen on the GPU from the largest inputs:

- PLAIN_X: while max q + max k <= MAX_SUM, the product is finite as it is.
- BOUNDED_X: beyond, x stops at MAX_X = 1 + exp(2 MAX_SUM), where tanh is 1 to the last digit.
- PER_PAIR: if an input is beyond MAX_INPUT, E or F could leave the range of float32. exp(2 (q + k)) is computed for
  each pair, which is right for any numbers and several times slower.

Arithmetic and results are float32. Cost: O(i j d) arithmetic, i j numbers of output (the caller cuts rows into blocks),
O((i + j) d) scratch. Gradients: O(i j d) arithmetic, O((i + j) d) numbers of output; differentiable once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch_cache import launch
from .tiles import LOG2E

MAX_SUM: tl.constexpr = tl.constexpr(10.5)  # x <= 1 + e^21 < 2^31, and four of them < 2^124
MAX_X: tl.constexpr = tl.constexpr(1.318815734e9)  # 1 + e^21
MAX_INPUT: tl.constexpr = tl.constexpr(40.0)  # e^80 and e^-80 are within float32
PLAIN_X: tl.constexpr = tl.constexpr(0)
BOUNDED_X: tl.constexpr = tl.constexpr(1)
PER_PAIR: tl.constexpr = tl.constexpr(2)
TOKENS_MULTIPLE = 128  # scratch is padded to a multiple of this many tokens, which every tile divides
FEATURES_PER_PROGRAM = 4
EXP_BLOCK = 32  # tokens, and features, of a program that computes exponentials
SCORE_TILE = (16, 128, 4)  # rows, keys, warps
GRADIENT_TILE = (16, 128, 2)  # tokens of the loop, tokens that stay, warps


@triton.jit
def _exponentials_kernel(
    Q, K, U, E, F, FACTORS, TOTAL, BOUND, q_b, q_h, q_i, k_b, k_g, k_j, u_h, rows, heads, groups, n_q, n_k, n_i, n_j, d,
    width, padded_i, padded_j,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the exponentials of q and k, one program per tile of a head, and u in float32 with its sum."""
    side = tl.program_id(2)
    if side < n_q:
        _store_exponentials(Q, E, BOUND, side, q_b, q_h, q_i, heads, n_i, d, width, padded_i, BLOCK)
    elif side < n_q + n_k:
        _store_exponentials(K, F, BOUND + 1, side - n_q, k_b, k_g, k_j, groups, n_j, d, width, padded_j, BLOCK)
    elif tl.program_id(0) + tl.program_id(1) == 0:
        for row in range(rows):
            total = 0.0
            for start in range(0, width, BLOCK):
                feature = start + tl.arange(0, BLOCK)
                u = tl.load(U + row * u_h + feature, mask=feature < d, other=0.0).to(tl.float32)
                tl.store(FACTORS + row * width + feature, u, mask=feature < width)
                total += tl.sum(u, 0)
            tl.store(TOTAL + row, total)


@triton.jit
def _store_exponentials(X, E, BOUND, side, x_b, x_h, x_n, heads, n, d, width, padded, BLOCK: tl.constexpr):
    """Store E = exp(2 x), features first: `b h n d -> b h width padded`; past n and d it is 0.

    Raise BOUND[0] to the largest x, and BOUND[2] to the largest abs(x); both start at 0.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, h = (side // heads).to(tl.int64), (side % heads).to(tl.int64)
    inside = (token < n)[:, None] & (feature < d)[None, :]
    at = X + b * x_b + h * x_h + token.to(tl.int64)[:, None] * x_n + feature[None, :]
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    tl.atomic_max(BOUND, tl.max(tl.max(x, 1), 0))
    tl.atomic_max(BOUND + 2, tl.max(tl.max(tl.where(inside, tl.abs(x), 0.0), 1), 0))
    into = E + side.to(tl.int64) * width * padded + feature.to(tl.int64)[None, :] * padded + token[:, None]
    tl.store(into, tl.exp2(x * (2 * LOG2E)), mask=(token < padded)[:, None] & (feature < width)[None, :])


@triton.jit
def _scores_kernel(
    Q, K, E, F, U, TOTAL, BOUND, S, q_b, q_h, q_i, k_b, k_g, k_j, u_h, heads, n_i, n_j, d, width, padded_i, padded_j,
    GROUP: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * J + tl.arange(0, J)
    row = tl.program_id(1) * I + tl.arange(0, I)
    bh = tl.program_id(2)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    g = h // GROUP
    U += h * u_h
    total = tl.load(TOTAL + tl.where(u_h > 0, h, 0))
    s = tl.zeros((I, J), tl.float32)
    E += bh.to(tl.int64) * width * padded_i + row
    F += (b * (heads // GROUP) + g) * width * padded_j + col
    if tl.load(BOUND) + tl.load(BOUND + 1) <= MAX_SUM:
        s = _add_features(s, E, F, U, width, padded_i, padded_j, PLAIN_X, FAST)
    elif tl.maximum(tl.load(BOUND + 2), tl.load(BOUND + 3)) <= MAX_INPUT:
        s = _add_features(s, E, F, U, width, padded_i, padded_j, BOUNDED_X, FAST)
    else:
        Q += b * q_b + h * q_h
        K += b * k_b + g * k_g
        for f in range(d):
            q = tl.load(Q + row.to(tl.int64) * q_i + f, mask=row < n_i, other=0.0).to(tl.float32)
            k = tl.load(K + col.to(tl.int64) * k_j + f, mask=col < n_j, other=0.0).to(tl.float32)
            s += tl.load(U + f) / (1 + tl.exp2((q[:, None] + k[None, :]) * (2 * LOG2E)))
    into = S + (bh.to(tl.int64) * n_i + row[:, None]) * n_j + col[None, :]
    tl.store(into, total - 2 * s, mask=(row < n_i)[:, None] & (col < n_j)[None, :])


@triton.jit
def _add_features(s, E, F, U, width, padded_i, padded_j, MODE: tl.constexpr, FAST: tl.constexpr):
    """Return s + sum_f u_f / x_f, four features over one denominator."""
    for f in range(0, width, 4):
        u0, u1, u2, u3 = tl.load(U + f), tl.load(U + f + 1), tl.load(U + f + 2), tl.load(U + f + 3)
        x0, x1, x2, x3 = _four_x(E, F, padded_i, padded_j, MODE)
        x01, x23 = x0 * x1, x2 * x3
        s += _divide((u0 * x1 + u1 * x0) * x23 + (u2 * x3 + u3 * x2) * x01, x01 * x23, FAST)
        E += 4 * padded_i
        F += 4 * padded_j
    return s


@triton.jit
def _gradient_sums_kernel(
    G, X, Y, E, F, BOUND, FIRST, SECOND, x_b, x_h, x_n, y_b, y_h, y_n, heads, n_x, n_y, d, width, padded_x, padded_y,
    GROUP_X: tl.constexpr,
    GROUP_Y: tl.constexpr,
    LOOP: tl.constexpr,
    STAY: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Store sum_y g_yx (R - R^2) for each token x and feature f, R = 1 / (1 + exp(2 (x_f + y_f))); FIRST: sum of g R.

    A program has four features and one tile of tokens that stay, and loops over all tokens of the other side.
    """
    stay = tl.program_id(0) * STAY + tl.arange(0, STAY)
    f = tl.program_id(1) * 4
    bh = tl.program_id(2)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    G += bh.to(tl.int64) * n_x * n_y
    E += ((b * (heads // GROUP_X) + h // GROUP_X) * width + f) * padded_x + stay
    F += ((b * (heads // GROUP_Y) + h // GROUP_Y) * width + f) * padded_y
    X += b * x_b + (h // GROUP_X) * x_h + f
    Y += b * y_b + (h // GROUP_Y) * y_h + f
    if tl.load(BOUND) + tl.load(BOUND + 1) <= MAX_SUM:
        a0, a1, a2, a3, c0, c1, c2, c3 = _sum_over_tokens(
            G,
            X,
            Y,
            E,
            F,
            FIRST,
            x_n,
            y_n,
            stay,
            f,
            n_x,
            n_y,
            d,
            padded_x,
            padded_y,
            PLAIN_X,
            LOOP,
            STAY,
            WARPS,
            FAST,
        )
    elif tl.maximum(tl.load(BOUND + 2), tl.load(BOUND + 3)) <= MAX_INPUT:
        a0, a1, a2, a3, c0, c1, c2, c3 = _sum_over_tokens(
            G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, padded_x, padded_y, BOUNDED_X, LOOP, STAY, WARPS, FAST
        )
    else:
        a0, a1, a2, a3, c0, c1, c2, c3 = _sum_over_tokens(
            G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, padded_x, padded_y, PER_PAIR, LOOP, STAY, WARPS, FAST
        )
    into = (bh.to(tl.int64) * width + f) * n_x + stay
    if FIRST is not None:
        _store_four(FIRST + into, a0, a1, a2, a3, stay, n_x)
    _store_four(SECOND + into, c0, c1, c2, c3, stay, n_x)


@triton.jit
def _sum_over_tokens(
    G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, padded_x, padded_y,
    MODE: tl.constexpr,
    LOOP: tl.constexpr,
    STAY: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return the sums of g R (0 if FIRST is None) and of g (R - R^2) for four features, separately per warp."""
    a0 = tl.zeros((WARPS, STAY), tl.float32)
    a1, a2, a3, c0, c1, c2, c3 = a0, a0, a0, a0, a0, a0, a0
    for start in range(0, n_y, LOOP):
        loop = start + tl.arange(0, LOOP)
        at = G + loop.to(tl.int64)[:, None] * n_x + stay[None, :]
        g = tl.load(at, mask=(loop < n_y)[:, None] & (stay < n_x)[None, :], other=0.0)
        if MODE == PER_PAIR:
            r0 = _reciprocal(X, Y, x_n, y_n, stay, loop, n_x, n_y, 0, f, d)
            r1 = _reciprocal(X, Y, x_n, y_n, stay, loop, n_x, n_y, 1, f, d)
            r2 = _reciprocal(X, Y, x_n, y_n, stay, loop, n_x, n_y, 2, f, d)
            r3 = _reciprocal(X, Y, x_n, y_n, stay, loop, n_x, n_y, 3, f, d)
        else:
            r0, r1, r2, r3 = _reciprocals(F + loop, E, padded_y, padded_x, MODE, FAST)
        if FIRST is not None:
            a0 += _sum_per_warp(g * r0, LOOP, STAY, WARPS)
            a1 += _sum_per_warp(g * r1, LOOP, STAY, WARPS)
            a2 += _sum_per_warp(g * r2, LOOP, STAY, WARPS)
            a3 += _sum_per_warp(g * r3, LOOP, STAY, WARPS)
        c0 += _sum_per_warp(g * (r0 - r0 * r0), LOOP, STAY, WARPS)
        c1 += _sum_per_warp(g * (r1 - r1 * r1), LOOP, STAY, WARPS)
        c2 += _sum_per_warp(g * (r2 - r2 * r2), LOOP, STAY, WARPS)
        c3 += _sum_per_warp(g * (r3 - r3 * r3), LOOP, STAY, WARPS)
    return a0, a1, a2, a3, c0, c1, c2, c3


@triton.jit
def _sum_per_warp(x, LOOP: tl.constexpr, STAY: tl.constexpr, WARPS: tl.constexpr):
    """Sum the rows of a tile per warp, which needs no communication between warps."""
    return tl.sum(tl.reshape(x, (LOOP // WARPS, WARPS, STAY)), 0)


@triton.jit
def _store_four(into, x0, x1, x2, x3, stay, n_x):
    tl.store(into, tl.sum(x0, 0), mask=stay < n_x)
    tl.store(into + n_x, tl.sum(x1, 0), mask=stay < n_x)
    tl.store(into + 2 * n_x, tl.sum(x2, 0), mask=stay < n_x)
    tl.store(into + 3 * n_x, tl.sum(x3, 0), mask=stay < n_x)


@triton.jit
def _reciprocals(E, F, padded_i, padded_j, MODE: tl.constexpr, FAST: tl.constexpr):
    """Return 1 / x of four features, with one reciprocal."""
    x0, x1, x2, x3 = _four_x(E, F, padded_i, padded_j, MODE)
    x01, x23 = x0 * x1, x2 * x3
    inverse = _divide(1.0, x01 * x23, FAST)
    inverse01, inverse23 = inverse * x23, inverse * x01
    return inverse01 * x1, inverse01 * x0, inverse23 * x3, inverse23 * x2


@triton.jit
def _reciprocal(X, Y, x_n, y_n, stay, loop, n_x, n_y, more: tl.constexpr, f, d):
    """Return R of one feature, for inputs of any size."""
    inside = f + more < d
    x = tl.load(X + stay.to(tl.int64) * x_n + more, mask=(stay < n_x) & inside, other=0.0).to(tl.float32)
    y = tl.load(Y + loop.to(tl.int64) * y_n + more, mask=(loop < n_y) & inside, other=0.0).to(tl.float32)
    return 1 / (1 + tl.exp2((y[:, None] + x[None, :]) * (2 * LOG2E)))


@triton.jit
def _four_x(E, F, padded_i, padded_j, MODE: tl.constexpr):
    """Return x of four features."""
    x0 = 1 + tl.load(E)[:, None] * tl.load(F)[None, :]
    x1 = 1 + tl.load(E + padded_i)[:, None] * tl.load(F + padded_j)[None, :]
    x2 = 1 + tl.load(E + 2 * padded_i)[:, None] * tl.load(F + 2 * padded_j)[None, :]
    x3 = 1 + tl.load(E + 3 * padded_i)[:, None] * tl.load(F + 3 * padded_j)[None, :]
    if MODE == BOUNDED_X:
        x0, x1, x2, x3 = _clip(x0), _clip(x1), _clip(x2), _clip(x3)
    return x0, x1, x2, x3


@triton.jit
def _clip(x):
    return tl.minimum(x, MAX_X, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _divide(x, y, FAST: tl.constexpr):
    """Return x / y."""
    if FAST:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [y], dtype=tl.float32, is_pure=True, pack=1
        )
        return x * inverse
    return x / y


class SavedTensors(NamedTuple):
    """The tensors that `score_gradients` needs."""

    q: Tensor
    k: Tensor
    u: Tensor
    exp_q: Tensor
    exp_k: Tensor
    bound: Tensor


def compute_scores(q: Tensor, k: Tensor, u: Tensor) -> tuple[Tensor, SavedTensors]:
    """Return the scores without an autograd graph, and the tensors that their gradients need."""
    q, k, u = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, u))
    b, h, i, d = q.shape
    g, j = k.shape[1:3]
    rows, u_stride = (u.shape[0], u.stride(0)) if u.ndim == 2 else (1, 0)
    width = -(-d // FEATURES_PER_PROGRAM) * FEATURES_PER_PROGRAM
    padded_i, padded_j = (-(-n // TOKENS_MULTIPLE) * TOKENS_MULTIPLE for n in (i, j))
    empty = partial(torch.empty, device=q.device)
    exp_q, exp_k, factors, total = (
        empty(size) for size in ((b, h, width, padded_i), (b, g, width, padded_j), (rows, width), (rows,))
    )
    bound = torch.zeros(4, device=q.device)
    launch(
        _exponentials_kernel, (max(padded_i, padded_j) // EXP_BLOCK, -(-width // EXP_BLOCK), b * (h + g) + 1),
        q, k, u, exp_q, exp_k, factors, total, bound, *q.stride()[:3], *k.stride()[:3], u_stride, rows, h, g, b * h,
        b * g, i, j, d, width, padded_i, padded_j, BLOCK=EXP_BLOCK,
    )  # fmt: skip
    s = empty((b, h, i, j))
    I, J, warps = SCORE_TILE
    launch(
        _scores_kernel, (-(-j // J), -(-i // I), b * h),
        q, k, exp_q, exp_k, factors, total, bound, s, *q.stride()[:3], *k.stride()[:3], width if rows > 1 else 0,
        h, i, j, d, width, padded_i, padded_j, GROUP=h // g, I=I, J=J, FAST=q.is_cuda, num_warps=warps,
    )  # fmt: skip
    return s, SavedTensors(q, k, u, exp_q, exp_k, bound)


def score_gradients(saved: SavedTensors, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and u, from that of the scores."""
    q, k, u, exp_q, exp_k, bound = saved
    b, h, i, d = q.shape
    g = k.shape[1]
    grad = grad.float()
    slope = gradient_sums(grad.contiguous(), k, q, exp_k, exp_q, bound, group_x=h // g, group_y=1)
    tanh_slope = 4 * (u.float()[:, None] if u.ndim == 2 else u.float())
    dk = slope[..., :d, :].mT * tanh_slope
    dk = dk if g == h else dk.unflatten(1, (g, h // g)).sum(2)
    first = torch.empty(b, h, exp_q.shape[2], i, device=q.device)
    slope = gradient_sums(grad.mT.contiguous(), q, k, exp_q, exp_k, bound, group_x=1, group_y=h // g, first=first)
    dq = slope[..., :d, :].mT * tanh_slope
    du = grad.sum((2, 3))[..., None] - 2 * first[..., :d, :].sum(-1)  # b h d
    du = du.sum(0) if u.ndim == 2 else du.sum((0, 1))
    du = du.sum(0, keepdim=True) if u.ndim == 2 and u.shape[0] == 1 else du
    return dq.to(q.dtype), dk.to(k.dtype), du.to(u.dtype)


def gradient_sums(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    exp_x: Tensor,
    exp_y: Tensor,
    bound: Tensor,
    *,
    group_x: int,
    group_y: int,
    first: Tensor | None = None,
) -> Tensor:
    """Return sum_y grad (R - R^2) per x and feature, `b h y x -> b h width x`; fill `first` with sum_y grad R."""
    b, h, n_y, n_x = grad.shape
    width = exp_x.shape[2]
    second = torch.empty(b, h, width, n_x, device=grad.device)
    loop, stay, warps = GRADIENT_TILE
    launch(
        _gradient_sums_kernel, (-(-n_x // stay), width // FEATURES_PER_PROGRAM, b * h),
        grad, x, y, exp_x, exp_y, bound, first, second, *x.stride()[:3], *y.stride()[:3], h, n_x, n_y, x.shape[-1],
        width, exp_x.shape[3], exp_y.shape[3], GROUP_X=group_x, GROUP_Y=group_y, LOOP=loop, STAY=stay, WARPS=warps,
        FAST=grad.is_cuda, num_warps=warps,
    )  # fmt: skip
    return second


class AdditiveScoresFunction(torch.autograd.Function):
    """s = sum(u) - 2 u . R."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, u: Tensor) -> Tensor:
        s, saved = compute_scores(q, k, u)
        ctx.save_for_backward(*saved)
        return s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return score_gradients(SavedTensors(*ctx.saved_tensors), grad)


def additive_scores(q: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """Return the scores in float32, differentiable once in q, k and u: `b h i d, b g j d, (h) d -> b h i j`."""
    s: Tensor = AdditiveScoresFunction.apply(q, k, u)
    return s
