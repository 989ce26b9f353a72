"""The entries of a k q^T tile that each thread holds, and sums over them without communication between threads.

In the result of a tensor-core product each thread holds two rows 8 apart, 16 per warp apart, and every fourth pair of
their columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_products(total, x, y, N: tl.constexpr):
    """Return total + the sum of x * y over their last dim, of size N, as a chain of multiply-adds."""
    if N == 1:
        total += tl.reshape(x, total.shape) * tl.reshape(y, total.shape)
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], N // 2, 2)))
        y0, y1 = tl.split(tl.reshape(y, (x.shape[0], x.shape[1], N // 2, 2)))
        total = add_products(total, x0, y0, N // 2)
        total = add_products(total, x1, y1, N // 2)
    return total


@triton.jit
def running_max(most, x, N: tl.constexpr):
    """Return the maximum of `most` and x along its last dim, of size N. (tl.max over it is wrong in some layouts.)"""
    if N == 1:
        most = tl.maximum(most, tl.reshape(x, most.shape))
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], N // 2, 2)))
        most = running_max(running_max(most, x0, N // 2), x1, N // 2)
    return most


@triton.jit
def key_order(J: tl.constexpr, WARPS: tl.constexpr):
    """Return, for each row of the product, the key of its tile that it is computed for.

    A thread holds rows of the product 8 apart, and those 16 a warp apart; this order gives it neighbouring keys.
    """
    n = tl.arange(0, J)
    share: tl.constexpr = min(WARPS, J // 16)
    return (n // 16 % share * 8 + n % 8) * (J // share // 8) + n // (16 * share) * 2 + n // 8 % 2


@triton.jit
def keys_by_thread(x, I: tl.constexpr, J: tl.constexpr, WARPS: tl.constexpr):
    """Group the keys of each query by the thread that holds them: `J I -> threads I keys`."""
    share: tl.constexpr = min(WARPS, J // 16)
    parts = tl.permute(tl.reshape(x, (J // (16 * share), share, 2, 8, I)), (1, 3, 4, 0, 2))
    return tl.reshape(parts, (8 * share, I, J // (8 * share)))


@triton.jit
def queries_by_thread(x, I: tl.constexpr, J: tl.constexpr, BINS: tl.constexpr):
    """Group the queries of each key by bin and thread, every fourth pair: `J I -> J bins 4 queries`."""
    parts = tl.permute(tl.reshape(x, (J, BINS, I // BINS // 8, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(parts, (J, BINS, 4, I // BINS // 4))
