"""Outputs over two parts of the keys merged into one: what `regard.merge` computes, in one pass.

    out = (e^l out_l + e^r out_r) / (e^l + e^r)        l, r: log-sum-exps of the two parts, b h i
    lse = log(e^l + e^r)

Each program merges a block of rows of one head. Arithmetic is float32. Cost: both outputs are read once and one is
written, where PyTorch's operators read and write float32 copies of them several times. No gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_cache import launch
from .tiles import padded_width

ROWS = 32  # rows that a program merges


@triton.jit
def _merge_kernel(
    LEFT, RIGHT, LEFT_LSE, RIGHT_LSE, OUT, LSE,
    left_b, left_h, left_i, right_b, right_h, right_i, out_b, out_h, out_i, heads, n_i,
    e: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    place = bh.to(tl.int64) * n_i + row
    inside = row < n_i
    left_lse = tl.load(LEFT_LSE + place, mask=inside, other=0.0)
    right_lse = tl.load(RIGHT_LSE + place, mask=inside, other=0.0)
    top = tl.maximum(left_lse, right_lse)
    is_empty = top == float("-inf")
    base = tl.where(is_empty, 0.0, top)
    left_share, right_share = tl.exp(left_lse - base), tl.exp(right_lse - base)
    total = tl.where(is_empty, 1.0, left_share + right_share)
    tl.store(LSE + place, tl.where(is_empty, float("-inf"), top + tl.log(total)), mask=inside)
    left_share, right_share = (left_share / total)[:, None], (right_share / total)[:, None]
    feature = tl.arange(0, E)[None, :]
    mask = inside[:, None] & (feature < e)
    row = row.to(tl.int64)[:, None]
    # A part with a share of 0 is not read: it may hold NaN.
    left = tl.load(LEFT + b * left_b + h * left_h + row * left_i + feature, mask=mask & (left_share != 0), other=0.0)
    right = tl.load(
        RIGHT + b * right_b + h * right_h + row * right_i + feature, mask=mask & (right_share != 0), other=0.0
    )
    out = left.to(tl.float32) * left_share + right.to(tl.float32) * right_share
    tl.store(OUT + b * out_b + h * out_h + row * out_i + feature, out.to(OUT.dtype.element_ty), mask=mask)


def merge_two(
    left: Tensor, right: Tensor, left_lse: Tensor, right_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`b h i e, b h i e, b h i, b h i -> b h i e` of this dtype, in memory as `b i h e`, and `b h i`, float32."""
    b, h, i, e = left.shape
    left, right = (x if x.stride(-1) == 1 else x.contiguous() for x in (left, right))
    left_lse, right_lse = (x.float().contiguous() for x in (left_lse, right_lse))
    out = torch.empty(b, i, h, e, device=left.device, dtype=dtype).transpose(1, 2)
    lse = torch.empty(b, h, i, device=left.device, dtype=torch.float32)
    if out.numel():
        launch(
            _merge_kernel, (triton.cdiv(i, ROWS), b * h),
            left, right, left_lse, right_lse, out, lse,
            *left.stride()[:3], *right.stride()[:3], *out.stride()[:3], h, i,
            e=e, E=padded_width(e), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return out, lse
