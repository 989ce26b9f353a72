"""What the gradients of additive scores are made of: sums over one side of g R and g (R - R^2), R = 1 / x.

tanh(q + k) = 1 - 2 R, and its slope is 4 (R - R^2). Each program has four features and one tile of the tokens that
stay, and goes over all those of the other side. Cost: O(i j d) arithmetic, O(n d) numbers of output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_cache import launch
from ..tiles import LOG2E
from .exponentials import ANY, BOUNDED, FAR, NEAR, REACH, four, over

FEATURES = 4
TILE = (16, 128, 2)  # tokens of the loop, tokens that stay, warps


@triton.jit
def _moments(
    G, X, Y, E, F, BOUND, FIRST, SECOND, x_b, x_h, x_n, y_b, y_h, y_n, heads, n_x, n_y, d, width, room_x, room_y,
    GROUP_X: tl.constexpr,
    GROUP_Y: tl.constexpr,
    LOOP: tl.constexpr,
    STAY: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """For each token x and feature f: sum_y g_yx (R - R^2) with R = 1 / (1 + exp(2 (x_f + y_f))); FIRST: of g_yx R."""
    stay = tl.program_id(0) * STAY + tl.arange(0, STAY)
    f = tl.program_id(1) * 4
    bh = tl.program_id(2)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    G += bh.to(tl.int64) * n_x * n_y
    E += ((b * (heads // GROUP_X) + h // GROUP_X) * width + f) * room_x + stay
    F += ((b * (heads // GROUP_Y) + h // GROUP_Y) * width + f) * room_y
    X += b * x_b + (h // GROUP_X) * x_h + f
    Y += b * y_b + (h // GROUP_Y) * y_h + f
    if tl.load(BOUND) + tl.load(BOUND + 1) <= REACH:
        a0, a1, a2, a3, c0, c1, c2, c3 = _sums(
            G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, room_x, room_y, NEAR, LOOP, STAY, WARPS, FAST
        )
    elif tl.maximum(tl.load(BOUND + 2), tl.load(BOUND + 3)) <= FAR:
        a0, a1, a2, a3, c0, c1, c2, c3 = _sums(
            G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, room_x, room_y, BOUNDED, LOOP, STAY, WARPS, FAST
        )
    else:
        a0, a1, a2, a3, c0, c1, c2, c3 = _sums(
            G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, room_x, room_y, ANY, LOOP, STAY, WARPS, FAST
        )
    into = (bh.to(tl.int64) * width + f) * n_x + stay
    if FIRST is not None:
        _stored(FIRST + into, a0, a1, a2, a3, stay, n_x)
    _stored(SECOND + into, c0, c1, c2, c3, stay, n_x)


@triton.jit
def _sums(
    G, X, Y, E, F, FIRST, x_n, y_n, stay, f, n_x, n_y, d, room_x, room_y,
    WAY: tl.constexpr,
    LOOP: tl.constexpr,
    STAY: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Those of g R, if they are asked for, and of g (R - R^2), for four features; each warp keeps sums of its own."""
    a0 = tl.zeros((WARPS, STAY), tl.float32)
    a1, a2, a3, c0, c1, c2, c3 = a0, a0, a0, a0, a0, a0, a0
    for start in range(0, n_y, LOOP):
        loop = start + tl.arange(0, LOOP)
        at = G + loop.to(tl.int64)[:, None] * n_x + stay[None, :]
        g = tl.load(at, mask=(loop < n_y)[:, None] & (stay < n_x)[None, :], other=0.0)
        if WAY == ANY:
            r0 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 0, f, d)
            r1 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 1, f, d)
            r2 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 2, f, d)
            r3 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 3, f, d)
        else:
            r0, r1, r2, r3 = _inverses(F + loop, E, room_y, room_x, WAY, FAST)
        if FIRST is not None:
            a0 += _by_warp(g * r0, LOOP, STAY, WARPS)
            a1 += _by_warp(g * r1, LOOP, STAY, WARPS)
            a2 += _by_warp(g * r2, LOOP, STAY, WARPS)
            a3 += _by_warp(g * r3, LOOP, STAY, WARPS)
        c0 += _by_warp(g * (r0 - r0 * r0), LOOP, STAY, WARPS)
        c1 += _by_warp(g * (r1 - r1 * r1), LOOP, STAY, WARPS)
        c2 += _by_warp(g * (r2 - r2 * r2), LOOP, STAY, WARPS)
        c3 += _by_warp(g * (r3 - r3 * r3), LOOP, STAY, WARPS)
    return a0, a1, a2, a3, c0, c1, c2, c3


@triton.jit
def _by_warp(x, LOOP: tl.constexpr, STAY: tl.constexpr, WARPS: tl.constexpr):
    """The rows of a tile, dealt out to the warps in turn: nothing crosses from one to another."""
    return tl.sum(tl.reshape(x, (LOOP // WARPS, WARPS, STAY)), 0)


@triton.jit
def _stored(into, x0, x1, x2, x3, stay, n_x):
    tl.store(into, tl.sum(x0, 0), mask=stay < n_x)
    tl.store(into + n_x, tl.sum(x1, 0), mask=stay < n_x)
    tl.store(into + 2 * n_x, tl.sum(x2, 0), mask=stay < n_x)
    tl.store(into + 3 * n_x, tl.sum(x3, 0), mask=stay < n_x)


@triton.jit
def _inverses(E, F, room_i, room_j, WAY: tl.constexpr, FAST: tl.constexpr):
    """1 / x of four features, by one reciprocal."""
    x0, x1, x2, x3 = four(E, F, room_i, room_j, WAY)
    x01, x23 = x0 * x1, x2 * x3
    inverse = over(1.0, x01 * x23, FAST)
    inverse01, inverse23 = inverse * x23, inverse * x01
    return inverse01 * x1, inverse01 * x0, inverse23 * x3, inverse23 * x2


@triton.jit
def _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, more: tl.constexpr, f, d):
    """R of one feature, for any numbers."""
    inside = f + more < d
    x = tl.load(X + stay.to(tl.int64) * x_n + more, mask=(stay < n_x) & inside, other=0.0).to(tl.float32)
    y = tl.load(Y + loop.to(tl.int64) * y_n + more, mask=(loop < n_y) & inside, other=0.0).to(tl.float32)
    return 1 / (1 + tl.exp2((y[:, None] + x[None, :]) * (2 * LOG2E)))


def moments(
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
    """Sum over y of grad (R - R^2), for each x and feature: `b h y x -> b h width x`; `first` is filled with grad R."""
    b, h, n_y, n_x = grad.shape
    width = exp_x.shape[2]
    second = torch.empty(b, h, width, n_x, device=grad.device)
    loop, stay, warps = TILE
    launch(
        _moments, (-(-n_x // stay), width // FEATURES, b * h),
        grad, x, y, exp_x, exp_y, bound, first, second, *x.stride()[:3], *y.stride()[:3], h, n_x, n_y, x.shape[-1],
        width, exp_x.shape[3], exp_y.shape[3], GROUP_X=group_x, GROUP_Y=group_y, LOOP=loop, STAY=stay, WARPS=warps,
        FAST=grad.is_cuda, num_warps=warps,
    )  # fmt: skip
    return second
