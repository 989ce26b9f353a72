"""u . tanh(q_i + k_j) for all pairs, and its gradients, without a tanh for each.

With E = exp(2 q) and F = exp(2 k), made once a token, and x_f = 1 + E_if F_jf,

    tanh(q_if + k_jf) = 1 - 2 / x_f,        s_ij = sum_f u_f - 2 sum_f u_f / x_f,

and four features share one reciprocal: u1/x1 + u2/x2 + u3/x3 + u4/x4 over x1 x2 x3 x4. That is 3.5 multiply-adds a
feature and a quarter of a reciprocal, where tanh takes one special function each. The slope of tanh is 4 (1/x - 1/x^2).

The product of four x must stay finite: it does while max q + max k <= REACH. Beyond, x stops at 1 + exp(2 REACH),
where tanh is 1 to the last digit. Where E or F could leave the range of float32, past FAR, exp(2 (q + k)) is taken for
each pair, which is right for any numbers and several times slower. Arithmetic and results are float32.

Cost: O(i j d) arithmetic, i j numbers of output (the caller cuts rows into pieces), O((i + j) d) scratch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .tiles import LOG2E

REACH: tl.constexpr = tl.constexpr(10.5)  # x <= 1 + e^21 < 2^31, four of them < 2^124
MOST: tl.constexpr = tl.constexpr(1.318815734e9)  # 1 + e^21
FAR: tl.constexpr = tl.constexpr(40.0)  # e^80 and e^-80 are inside float32
FEATURES = 4
ROOM = 128  # tokens that every tile divides


@triton.jit
def _exponentials(
    X, E, BOUND, x_b, x_h, x_n, heads, n, d, width, room,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """E = exp(2 x), features first: `b h n d -> b h width room`; past n and d it is 0.

    BOUND has the largest x, and at 2 the largest that is without its sign; both are 0 at least.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    b, h = (tl.program_id(2) // heads).to(tl.int64), (tl.program_id(2) % heads).to(tl.int64)
    inside = (token < n)[:, None] & (feature < d)[None, :]
    at = X + b * x_b + h * x_h + token.to(tl.int64)[:, None] * x_n + feature[None, :]
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    tl.atomic_max(BOUND, tl.max(tl.max(x, 1), 0))
    tl.atomic_max(BOUND + 2, tl.max(tl.max(tl.where(inside, tl.abs(x), 0.0), 1), 0))
    into = E + tl.program_id(2).to(tl.int64) * width * room + feature.to(tl.int64)[None, :] * room + token[:, None]
    tl.store(into, tl.exp2(x * (2 * LOG2E)), mask=(token < room)[:, None] & (feature < width)[None, :])


@triton.jit
def _over(x, y, FAST: tl.constexpr):
    """x / y."""
    if FAST:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [y], dtype=tl.float32, is_pure=True, pack=1
        )
        return x * inverse
    return x / y


@triton.jit
def _scores(
    Q, K, E, F, U, TOTAL, BOUND, S, q_b, q_h, q_i, k_b, k_g, k_j, u_h, heads, n_i, n_j, d, width, room_i, room_j,
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
    E += bh.to(tl.int64) * width * room_i + row
    F += (b * (heads // GROUP) + g) * width * room_j + col
    if tl.load(BOUND) + tl.load(BOUND + 1) <= REACH:
        s = _by_fours(s, E, F, U, width, room_i, room_j, False, FAST)
    elif tl.maximum(tl.load(BOUND + 2), tl.load(BOUND + 3)) <= FAR:
        s = _by_fours(s, E, F, U, width, room_i, room_j, True, FAST)
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
def _by_fours(s, E, F, U, width, room_i, room_j, BOUNDED: tl.constexpr, FAST: tl.constexpr):
    """s + sum_f u_f / x_f, four features over one denominator."""
    for f in range(0, width, 4):
        u0, u1, u2, u3 = tl.load(U + f), tl.load(U + f + 1), tl.load(U + f + 2), tl.load(U + f + 3)
        x0, x1, x2, x3 = _four(E, F, room_i, room_j, BOUNDED)
        x01, x23 = x0 * x1, x2 * x3
        s += _over((u0 * x1 + u1 * x0) * x23 + (u2 * x3 + u3 * x2) * x01, x01 * x23, FAST)
        E += 4 * room_i
        F += 4 * room_j
    return s


@triton.jit
def _four(E, F, room_i, room_j, BOUNDED: tl.constexpr):
    """x of four features."""
    x0 = 1 + tl.load(E)[:, None] * tl.load(F)[None, :]
    x1 = 1 + tl.load(E + room_i)[:, None] * tl.load(F + room_j)[None, :]
    x2 = 1 + tl.load(E + 2 * room_i)[:, None] * tl.load(F + 2 * room_j)[None, :]
    x3 = 1 + tl.load(E + 3 * room_i)[:, None] * tl.load(F + 3 * room_j)[None, :]
    if BOUNDED:
        x0, x1, x2, x3 = _at_most(x0), _at_most(x1), _at_most(x2), _at_most(x3)
    return x0, x1, x2, x3


@triton.jit
def _at_most(x):
    return tl.minimum(x, MOST, propagate_nan=tl.PropagateNan.ALL)


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
    """For each token x and feature f: sum_y g_yx R and sum_y g_yx (R - R^2) with R = 1 / (1 + exp(2 (x_f + y_f)))."""
    stay = tl.program_id(0) * STAY + tl.arange(0, STAY)
    f = tl.program_id(1) * 4
    bh = tl.program_id(2)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    G += bh.to(tl.int64) * n_x * n_y
    E += ((b * (heads // GROUP_X) + h // GROUP_X) * width + f) * room_x + stay
    F += ((b * (heads // GROUP_Y) + h // GROUP_Y) * width + f) * room_y
    X += b * x_b + (h // GROUP_X) * x_h + f
    Y += b * y_b + (h // GROUP_Y) * y_h + f
    close = tl.load(BOUND) + tl.load(BOUND + 1) <= REACH
    far = tl.maximum(tl.load(BOUND + 2), tl.load(BOUND + 3)) > FAR
    # The rows of a tile are dealt out to the warps in turn: each keeps sums of its own until the end.
    a0 = tl.zeros((WARPS, STAY), tl.float32)
    a1, a2, a3, c0, c1, c2, c3 = a0, a0, a0, a0, a0, a0, a0
    for start in range(0, n_y, LOOP):
        loop = start + tl.arange(0, LOOP)
        at = G + loop.to(tl.int64)[:, None] * n_x + stay[None, :]
        g = tl.load(at, mask=(loop < n_y)[:, None] & (stay < n_x)[None, :], other=0.0)
        if close:
            r0, r1, r2, r3 = _inverses(F + loop, E, room_y, room_x, False, FAST)
        elif not far:
            r0, r1, r2, r3 = _inverses(F + loop, E, room_y, room_x, True, FAST)
        else:
            r0 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 0, f, d)
            r1 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 1, f, d)
            r2 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 2, f, d)
            r3 = _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, 3, f, d)
        a0, c0 = _gather(a0, c0, g, r0, LOOP, STAY, WARPS)
        a1, c1 = _gather(a1, c1, g, r1, LOOP, STAY, WARPS)
        a2, c2 = _gather(a2, c2, g, r2, LOOP, STAY, WARPS)
        a3, c3 = _gather(a3, c3, g, r3, LOOP, STAY, WARPS)
    into = (bh.to(tl.int64) * width + f) * n_x + stay
    valid = stay < n_x
    tl.store(FIRST + into, tl.sum(a0, 0), mask=valid)
    tl.store(FIRST + into + n_x, tl.sum(a1, 0), mask=valid)
    tl.store(FIRST + into + 2 * n_x, tl.sum(a2, 0), mask=valid)
    tl.store(FIRST + into + 3 * n_x, tl.sum(a3, 0), mask=valid)
    tl.store(SECOND + into, tl.sum(c0, 0), mask=valid)
    tl.store(SECOND + into + n_x, tl.sum(c1, 0), mask=valid)
    tl.store(SECOND + into + 2 * n_x, tl.sum(c2, 0), mask=valid)
    tl.store(SECOND + into + 3 * n_x, tl.sum(c3, 0), mask=valid)


@triton.jit
def _inverses(E, F, room_i, room_j, BOUNDED: tl.constexpr, FAST: tl.constexpr):
    """1 / x of four features, by one reciprocal."""
    x0, x1, x2, x3 = _four(E, F, room_i, room_j, BOUNDED)
    x01, x23 = x0 * x1, x2 * x3
    inverse = _over(1.0, x01 * x23, FAST)
    inverse01, inverse23 = inverse * x23, inverse * x01
    return inverse01 * x1, inverse01 * x0, inverse23 * x3, inverse23 * x2


@triton.jit
def _gather(first, second, g, r, LOOP: tl.constexpr, STAY: tl.constexpr, WARPS: tl.constexpr):
    """The sums with g r and g (r - r^2) added."""
    first += tl.sum(tl.reshape(g * r, (LOOP // WARPS, WARPS, STAY)), 0)
    second += tl.sum(tl.reshape(g * (r - r * r), (LOOP // WARPS, WARPS, STAY)), 0)
    return first, second


@triton.jit
def _one(X, Y, x_n, y_n, stay, loop, n_x, n_y, more: tl.constexpr, f, d):
    """R of one feature, for any numbers."""
    inside = f + more < d
    x = tl.load(X + stay.to(tl.int64) * x_n + more, mask=(stay < n_x) & inside, other=0.0).to(tl.float32)
    y = tl.load(Y + loop.to(tl.int64) * y_n + more, mask=(loop < n_y) & inside, other=0.0).to(tl.float32)
    return 1 / (1 + tl.exp2((y[:, None] + x[None, :]) * (2 * LOG2E)))


def additive_scores(q: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """The scores in float32, differentiable once in q, k and u: `b h i d, b g j d, (h) d -> b h i j`."""
    s: Tensor = AdditiveScores.apply(q, k, u)
    return s


class AdditiveScores(torch.autograd.Function):
    """s = sum(u) - 2 u . R."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, u: Tensor) -> Tensor:
        s, at_hand = scored(q, k, u)
        ctx.save_for_backward(*at_hand)
        return s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradients(AtHand(*ctx.saved_tensors), grad)


class AtHand(NamedTuple):
    """What gradients are made of."""

    q: Tensor
    k: Tensor
    u: Tensor
    exp_q: Tensor
    exp_k: Tensor
    bound: Tensor


def scored(q: Tensor, k: Tensor, u: Tensor) -> tuple[Tensor, AtHand]:
    """The scores, without a graph."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    b, h, i, d = q.shape
    g, j = k.shape[1:3]
    bound = torch.zeros(4, device=q.device)
    exp_q, exp_k = exponentials(q, bound), exponentials(k, bound[1:])
    width = exp_q.shape[2]
    factors = u.float().expand(h, d) if u.ndim == 2 else u.float()
    factors = F.pad(factors, (0, width - d)).contiguous()
    s = torch.empty(b, h, i, j, device=q.device)
    I, J, warps = SCORES
    _scores[(triton.cdiv(j, J), triton.cdiv(i, I), b * h)](
        q, k, exp_q, exp_k, factors, factors.sum(-1), bound, s, *q.stride()[:3], *k.stride()[:3],
        width if u.ndim == 2 else 0, h, i, j, d, width, exp_q.shape[3], exp_k.shape[3],
        GROUP=h // g, I=I, J=J, FAST=q.is_cuda, num_warps=warps,
    )  # fmt: skip
    return s, AtHand(q, k, u, exp_q, exp_k, bound)


def gradients(at_hand: AtHand, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and u, from those of the scores."""
    q, k, u, exp_q, exp_k, bound = at_hand
    h, d, g = q.shape[1], q.shape[3], k.shape[1]
    grad = grad.float()
    _, slope = moments(grad.contiguous(), k, q, exp_k, exp_q, bound, h // g, 1)
    wide = u.float()[:, None] if u.ndim == 2 else u.float()
    dk = slope[..., :d, :].mT * (4 * wide)
    dk = dk.unflatten(1, (g, h // g)).sum(2)
    first, slope = moments(grad.mT.contiguous(), q, k, exp_q, exp_k, bound, 1, h // g)
    dq = slope[..., :d, :].mT * (4 * wide)
    du = grad.sum((2, 3))[..., None] - 2 * first[..., :d, :].sum(-1)  # b h d
    du = du.sum(0) if u.ndim == 2 else du.sum((0, 1))
    du = du.sum(0, keepdim=True) if u.ndim == 2 and u.shape[0] == 1 else du
    return dq.to(q.dtype), dk.to(k.dtype), du.to(u.dtype)


SCORES = (16, 128, 4)  # rows and keys of a tile, warps
MOMENTS = (16, 128, 4)


def exponentials(x: Tensor, bound: Tensor) -> Tensor:
    """exp(2 x), features first and both filled up with 0: `b h n d -> b h width room`."""
    b, h, n, d = x.shape
    width, room = -(-d // FEATURES) * FEATURES, -(-n // ROOM) * ROOM
    e = torch.empty(b, h, width, room, device=x.device)
    _exponentials[(room // 32, triton.cdiv(width, 32), b * h)](
        x, e, bound, *x.stride()[:3], h, n, d, width, room, TOKENS=32, WIDTH=32
    )
    return e


def moments(
    grad: Tensor, x: Tensor, y: Tensor, exp_x: Tensor, exp_y: Tensor, bound: Tensor, group_x: int, group_y: int
) -> tuple[Tensor, Tensor]:
    """sum over y of grad R and grad (R - R^2), for each x and feature: `b h y x -> b h width x`, twice."""
    b, h, n_y, n_x = grad.shape
    width = exp_x.shape[2]
    first = torch.empty(b, h, width, n_x, device=grad.device)
    second = torch.empty_like(first)
    loop, stay, warps = MOMENTS
    _moments[(triton.cdiv(n_x, stay), width // FEATURES, b * h)](
        grad, x, y, exp_x, exp_y, bound, first, second, *x.stride()[:3], *y.stride()[:3], h, n_x, n_y, x.shape[-1],
        width, exp_x.shape[3], exp_y.shape[3], GROUP_X=group_x, GROUP_Y=group_y, LOOP=loop, STAY=stay, WARPS=warps,
        FAST=grad.is_cuda, num_warps=warps,
    )  # fmt: skip
    return first, second
