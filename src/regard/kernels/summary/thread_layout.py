"""What a thread holds of a tile of k q^T, and sums over it that pass nothing to another thread.

Of the result of a product a thread holds two rows 8 apart, 16 a warp apart, and of each every fourth pair of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_products(total, x, y, N: tl.constexpr):
    """total + sum of x * y over their last dim, of N: a multiply-add each, one after the other."""
    if N == 1:
        total += tl.reshape(x, total.shape) * tl.reshape(y, total.shape)
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], N // 2, 2)))
        y0, y1 = tl.split(tl.reshape(y, (x.shape[0], x.shape[1], N // 2, 2)))
        total = add_products(total, x0, y0, N // 2)
        total = add_products(total, x1, y1, N // 2)
    return total


@triton.jit
def larger(most, x, N: tl.constexpr):
    """The larger of most and every x along the last dim, of N. (Reductions over it went wrong in some layouts.)"""
    if N == 1:
        most = tl.maximum(most, tl.reshape(x, most.shape))
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], N // 2, 2)))
        most = larger(larger(most, x0, N // 2), x1, N // 2)
    return most


@triton.jit
def dealt_keys(J: tl.constexpr, WARPS: tl.constexpr):
    """Which key of its tile each row of the product is.

    A thread holds rows of the product 8 apart, and those 16 a warp apart: it is given neighbours instead.
    """
    n = tl.arange(0, J)
    share: tl.constexpr = min(WARPS, J // 16)
    return (n // 16 % share * 8 + n % 8) * (J // share // 8) + n // (16 * share) * 2 + n // 8 % 2


@triton.jit
def keys_of_threads(x, I: tl.constexpr, J: tl.constexpr, WARPS: tl.constexpr):
    """The keys of a query by the thread that holds them: `J I -> threads I keys`."""
    share: tl.constexpr = min(WARPS, J // 16)
    parts = tl.permute(tl.reshape(x, (J // (16 * share), share, 2, 8, I)), (1, 3, 4, 0, 2))
    return tl.reshape(parts, (8 * share, I, J // (8 * share)))


@triton.jit
def rows_of_threads(x, I: tl.constexpr, J: tl.constexpr, BINS: tl.constexpr):
    """The queries of a key by bin and thread, every fourth pair: `J I -> J bins 4 queries`."""
    parts = tl.permute(tl.reshape(x, (J, BINS, I // BINS // 8, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(parts, (J, BINS, 4, I // BINS // 4))
