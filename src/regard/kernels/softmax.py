"""Softmax of stored rows with its log-sum-exp, and the gradient of a softmax: one kernel launch each.

    A_ij = exp(s_ij - lse_i)        lse_i = log sum_j exp(s_ij)        ds_ij = A_ij (dA_ij - sum_j A_ij dA_ij)

One program per row reads it twice, MAX_BLOCK numbers at a time. Arithmetic is float32. Cost: two reads and one write
of the matrix. A row that is -inf throughout is not supported: it gives NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_cache import launch
from .tiles import LOG2E, next_power_of_two

MAX_BLOCK = 4096  # numbers of a row in one block


@triton.jit
def _softmax_kernel(S, A, LSE, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    S += row * n
    A += row * n
    largest = float("-inf")
    total = 0.0
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        s = tl.load(S + col, mask=col < n, other=float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(s, 0))
        total = total * tl.exp2((before - largest) * LOG2E) + tl.sum(tl.exp2((s - largest) * LOG2E), 0)
    tl.store(LSE + row, largest + tl.log(total))
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        s = tl.load(S + col, mask=col < n, other=float("-inf"))
        tl.store(A + col, tl.exp2((s - largest) * LOG2E) / total, mask=col < n)


@triton.jit
def _softmax_gradient_kernel(A, DA, DS, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    A += row * n
    DA += row * n
    DS += row * n
    mean = 0.0
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        a, da = _load_weights_and_gradient(A, DA, col, n)
        mean += tl.sum(a * da, 0)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        a, da = _load_weights_and_gradient(A, DA, col, n)
        tl.store(DS + col, a * (da - mean), mask=col < n)


@triton.jit
def _load_weights_and_gradient(A, DA, col, n):
    a = tl.load(A + col, mask=col < n, other=0.0).to(tl.float32)
    return a, tl.load(DA + col, mask=col < n, other=0.0).to(tl.float32)


def softmax(s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights in `dtype` and the log-sum-exp of float32 scores: `b h i j -> b h i j, b h i 1`."""
    A = torch.empty(s.shape, device=s.device, dtype=dtype)
    lse = torch.empty((*s.shape[:3], 1), device=s.device)
    launch(_softmax_kernel, (lse.numel(),), s, A, lse, s.shape[-1], BLOCK=_block(s))
    return A, lse


def softmax_gradient(A: Tensor, dA: Tensor) -> Tensor:
    """Return the gradient of the scores in float32, from that of the weights: A (dA - sum_j A dA)."""
    ds = torch.empty(A.shape, device=A.device)
    launch(
        _softmax_gradient_kernel, (A.numel() // A.shape[-1],), A, dA.contiguous(), ds, A.shape[-1], BLOCK=_block(A)
    )  # fmt: skip
    return ds


def _block(x: Tensor) -> int:
    return min(MAX_BLOCK, next_power_of_two(x.shape[-1]))
