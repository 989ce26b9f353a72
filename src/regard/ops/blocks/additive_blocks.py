"""u . tanh(q_i + k_j) for all pairs, without a tanh for each: `b h i d, b g j d, (h) d -> b h i j`.

With E_i = exp(2 (q_i - c)) and F_j = exp(2 (k_j + c)), made once per token for a centre c per feature,

    tanh(q_i + k_j) = 1 - 2 R,    R = 1 / (1 + E_i F_j),    so    s_ij = sum(u) - 2 u . R_ij,

one multiply-add and one reciprocal for each pair and feature, in chunks that stay in cache. The range is guarded:
c centres the queries, so that |q - c| <= REACH and no E is 0 or infinite; F may be, and then R is 1 or 0 as it should
be. Where queries of a block lie farther apart than that, tanh itself is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_state import refuse_jvp

REACH = 15.0  # largest |q - c|; exp(2 * REACH) and its inverse are far inside float32
CHUNK_ENTRIES = 2**19  # pairs x features: two megabytes of float32


def additive_scores(q: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """The additive scores of a block, differentiable once in q, k and u."""
    b, h, i, d = q.shape
    g, j = k.shape[1:3]
    k = k if g == h else k.repeat_interleave(h // g, 1)
    u = u.expand(b, h, d)
    s = BlockAdditiveScores.apply(q.reshape(b * h, i, d), k.reshape(b * h, j, d), u.reshape(b * h, d))
    return s.view(b, h, i, j)


class BlockAdditiveScores(torch.autograd.Function):
    """n i d, n j d, n d -> n i j."""

    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, u)
        s = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
        for (n, i, j), gap in _half_gaps(q, k):
            s[n, i, j] = (gap.flatten(1, 2) @ u[n, :, None]).view(gap.shape[:3])
        return s.mul_(-2).add_(u.sum(-1)[:, None, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, u = ctx.saved_tensors
        dq, dk, du = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(u)
        for (n, i, j), gap in _half_gaps(q, k):
            part = grad[n, i, j]
            du[n] -= 2 * (part.flatten(1)[:, None] @ gap.flatten(1, 2)).squeeze(1)
            # The slope of tanh is 1 - tanh^2 = 4 R (1 - R).
            slope = gap.addcmul_(gap, gap, value=-1).mul_(part[..., None])
            dq[n, i] += slope.sum(2)
            dk[n, j] += slope.sum(1)
        du += grad.sum((1, 2))[:, None]
        return dq * u[:, None] * 4, dk * u[:, None] * 4, du


def _half_gaps(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """R = (1 - tanh(q_i + k_j)) / 2, chunk by chunk, n i j d."""
    if not q.shape[:2].numel():
        return
    low, high = q.amin(1, keepdim=True), q.amax(1, keepdim=True)
    near = bool((high - low).max() <= 2 * REACH)
    if near:
        center = (low + high) / 2
        q = torch.exp(2 * (q - center))
        k = torch.exp(2 * (k + center))
    one = q.new_ones(())
    for n, i, j in _cuts(*q.shape[:2], *k.shape[1:]):
        queries, keys = q[n, i, None], k[n, None, j]
        if near:
            yield (n, i, j), torch.addcmul(one, queries, keys).reciprocal_()
        else:
            yield (n, i, j), torch.tanh(queries + keys).mul_(-0.5).add_(0.5)


def _cuts(n: int, i: int, j: int, d: int) -> Iterator[tuple[slice, slice, slice]]:
    cols = max(1, min(j, CHUNK_ENTRIES // (16 * d)))
    rows = max(1, min(i, CHUNK_ENTRIES // (cols * d)))
    batch = max(1, CHUNK_ENTRIES // (rows * cols * d))
    for a in range(0, n, batch):
        for r in range(0, i, rows):
            for c in range(0, j, cols):
                yield slice(a, a + batch), slice(r, r + rows), slice(c, c + cols)
