"""Scores of each query with its own choice of key runs: the second pass of `Weights.topk`.

    s_inr = q_i . k_j,        j = runs_in * R + r        runs: b h i n, integers; a run is R neighbouring keys

One program per query reads its n x R keys and no others. Arithmetic and results are float32. s is 0 past the last key.

Cost: n x R x d multiply-adds per query without tensor cores, so it pays only if n runs are a small part of all keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_cache import launch
from .tiles import padded_width, with_contiguous_features


@triton.jit
def _run_scores_kernel(
    Q, K, RUNS, S, q_b, q_h, q_i, k_b, k_g, k_j, heads, n_i, n_j, n,
    d: tl.constexpr,
    KV_GROUP: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) % n_i
    bh = tl.program_id(0) // n_i
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    feature = tl.arange(0, D)
    q = tl.load(Q + b * q_b + h * q_h + row.to(tl.int64) * q_i + feature, mask=feature < d, other=0.0).to(tl.float32)
    K += b * k_b + (h // KV_GROUP) * k_g
    own = tl.program_id(0).to(tl.int64) * n
    for m in range(n):
        key = tl.load(RUNS + own + m).to(tl.int64) * R + tl.arange(0, R)
        inside = (key < n_j)[:, None] & (feature < d)[None, :]
        k = tl.load(K + key[:, None] * k_j + feature[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(S + (own + m) * R + tl.arange(0, R), tl.sum(k * q[None, :], 1))


def score_key_runs(q: Tensor, k: Tensor, runs: Tensor, size: int) -> Tensor:
    """`b h i d, b g j d, b h i n -> b h i (n size)`; `size`, the number of keys in a run, is a power of two."""
    q, k, runs = with_contiguous_features(q), with_contiguous_features(k), runs.contiguous()
    b, h, n_i, d = q.shape
    g, n_j = k.shape[1:3]
    n = runs.shape[-1]
    s = torch.empty(b, h, n_i, n * size, device=q.device, dtype=torch.float32)
    if s.numel():
        launch(
            _run_scores_kernel, (b * h * n_i,),
            q, k, runs, s, *q.stride()[:3], *k.stride()[:3], h, n_i, n_j, n,
            d=d, KV_GROUP=h // g, R=size, D=padded_width(d), num_warps=1,
        )  # fmt: skip
    return s
