"""u . tanh(q_i + k_j) for all pairs, and its gradients, without a tanh for each.

With E = exp(2 q) and F = exp(2 k), made once a token, and x_f = 1 + E_if F_jf,

    tanh(q_if + k_jf) = 1 - 2 / x_f,        s_ij = sum_f u_f - 2 sum_f u_f / x_f,

and four features share one reciprocal: u1/x1 + u2/x2 + u3/x3 + u4/x4 over x1 x2 x3 x4. That is 3.5 multiply-adds a
feature and a quarter of a reciprocal, where tanh takes one special function each. The slope of tanh is 4 (1/x - 1/x^2).

`fours` keeps the product of four x finite. Where E or F could leave the range of float32, past FAR, exp(2 (q + k)) is
taken for each pair, which is right for any numbers and several times slower. Arithmetic and results are float32.

Cost: O(i j d) arithmetic, i j numbers of output (the caller cuts rows into pieces), O((i + j) d) scratch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch_cache import launch
from ..tiles import LOG2E
from .additive_gradients import FEATURES, moments
from .exponentials import BOUNDED, FAR, NEAR, REACH, four, over

ROOM = 128  # tokens that every tile divides
TILE = (16, 128, 4)  # rows, keys, warps
BLOCK = 32  # tokens, and features, of a program that takes exponentials


@triton.jit
def _prepare(
    Q, K, U, E, F, FACTORS, TOTAL, BOUND, q_b, q_h, q_i, k_b, k_g, k_j, u_h, rows, heads, groups, n_q, n_k, n_i, n_j, d,
    width, room_i, room_j,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs for the heads of q, then for those of k, and one for u and its sum."""
    side = tl.program_id(2)
    if side < n_q:
        _exponentials(Q, E, BOUND, side, q_b, q_h, q_i, heads, n_i, d, width, room_i, BLOCK)
    elif side < n_q + n_k:
        _exponentials(K, F, BOUND + 1, side - n_q, k_b, k_g, k_j, groups, n_j, d, width, room_j, BLOCK)
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
def _exponentials(X, E, BOUND, side, x_b, x_h, x_n, heads, n, d, width, room, BLOCK: tl.constexpr):
    """E = exp(2 x), features first: `b h n d -> b h width room`; past n and d it is 0.

    BOUND has the largest x, and at 2 the largest that is without its sign; both are 0 at least.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, h = (side // heads).to(tl.int64), (side % heads).to(tl.int64)
    inside = (token < n)[:, None] & (feature < d)[None, :]
    at = X + b * x_b + h * x_h + token.to(tl.int64)[:, None] * x_n + feature[None, :]
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    tl.atomic_max(BOUND, tl.max(tl.max(x, 1), 0))
    tl.atomic_max(BOUND + 2, tl.max(tl.max(tl.where(inside, tl.abs(x), 0.0), 1), 0))
    into = E + side.to(tl.int64) * width * room + feature.to(tl.int64)[None, :] * room + token[:, None]
    tl.store(into, tl.exp2(x * (2 * LOG2E)), mask=(token < room)[:, None] & (feature < width)[None, :])


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
        s = _by_fours(s, E, F, U, width, room_i, room_j, NEAR, FAST)
    elif tl.maximum(tl.load(BOUND + 2), tl.load(BOUND + 3)) <= FAR:
        s = _by_fours(s, E, F, U, width, room_i, room_j, BOUNDED, FAST)
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
def _by_fours(s, E, F, U, width, room_i, room_j, WAY: tl.constexpr, FAST: tl.constexpr):
    """s + sum_f u_f / x_f, four features over one denominator."""
    for f in range(0, width, 4):
        u0, u1, u2, u3 = tl.load(U + f), tl.load(U + f + 1), tl.load(U + f + 2), tl.load(U + f + 3)
        x0, x1, x2, x3 = four(E, F, room_i, room_j, WAY)
        x01, x23 = x0 * x1, x2 * x3
        s += over((u0 * x1 + u1 * x0) * x23 + (u2 * x3 + u3 * x2) * x01, x01 * x23, FAST)
        E += 4 * room_i
        F += 4 * room_j
    return s


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
    q, k, u = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, u))
    b, h, i, d = q.shape
    g, j = k.shape[1:3]
    rows, between = (u.shape[0], u.stride(0)) if u.ndim == 2 else (1, 0)
    width, room_i, room_j = (-(-n // least) * least for n, least in ((d, FEATURES), (i, ROOM), (j, ROOM)))
    number = partial(torch.empty, device=q.device)
    exp_q, exp_k, factors, total = (
        number(size) for size in ((b, h, width, room_i), (b, g, width, room_j), (rows, width), (rows,))
    )
    bound = torch.zeros(4, device=q.device)
    launch(
        _prepare, (max(room_i, room_j) // BLOCK, -(-width // BLOCK), b * (h + g) + 1),
        q, k, u, exp_q, exp_k, factors, total, bound, *q.stride()[:3], *k.stride()[:3], between, rows, h, g, b * h,
        b * g, i, j, d, width, room_i, room_j, BLOCK=BLOCK,
    )  # fmt: skip
    s = number((b, h, i, j))
    I, J, warps = TILE
    launch(
        _scores, (-(-j // J), -(-i // I), b * h),
        q, k, exp_q, exp_k, factors, total, bound, s, *q.stride()[:3], *k.stride()[:3], width if rows > 1 else 0,
        h, i, j, d, width, room_i, room_j, GROUP=h // g, I=I, J=J, FAST=q.is_cuda, num_warps=warps,
    )  # fmt: skip
    return s, AtHand(q, k, u, exp_q, exp_k, bound)


def gradients(at_hand: AtHand, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and u, from those of the scores."""
    q, k, u, exp_q, exp_k, bound = at_hand
    b, h, i, d = q.shape
    g = k.shape[1]
    grad = grad.float()
    slope = moments(grad.contiguous(), k, q, exp_k, exp_q, bound, group_x=h // g, group_y=1)
    steep = 4 * (u.float()[:, None] if u.ndim == 2 else u.float())
    dk = slope[..., :d, :].mT * steep
    dk = dk if g == h else dk.unflatten(1, (g, h // g)).sum(2)
    first = torch.empty(b, h, exp_q.shape[2], i, device=q.device)
    slope = moments(grad.mT.contiguous(), q, k, exp_q, exp_k, bound, group_x=1, group_y=h // g, first=first)
    dq = slope[..., :d, :].mT * steep
    du = grad.sum((2, 3))[..., None] - 2 * first[..., :d, :].sum(-1)  # b h d
    du = du.sum(0) if u.ndim == 2 else du.sum((0, 1))
    du = du.sum(0, keepdim=True) if u.ndim == 2 and u.shape[0] == 1 else du
    return dq.to(q.dtype), dk.to(k.dtype), du.to(u.dtype)
