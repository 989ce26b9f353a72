"""The entries of a q k^T tile that each thread of the Hopper kernel holds, and sums without communication.

Each thread holds two rows, 8 apart, of a 64 x 64 product, and every fourth pair of their keys: 16 of each row. This is
`thread_layout` in Gluon, which cannot call it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_in_block(part, n):
    """Return which of the 128 rows is row n of a part.

    Over both parts a thread holds four of eight neighbouring rows, two apart.
    """
    return first_row_of_thread(n) + rows_after_first(part, n)


@gluon.jit
def first_row_of_thread(n):
    """Return the first of the 128 rows that the thread with row n holds."""
    return n // 16 * 32 + n % 8 // 2 * 8 + n % 2


@gluon.jit
def rows_after_first(part, n):
    """Return how far row n of a part lies after the thread's first row; known at compile time for each register."""
    return part * 2 + n // 8 % 2 * 4


@gluon.jit
def keys_by_thread(x):
    """Group the keys of a row by the thread that holds them: `64 64 -> 64 4 16`."""
    return x.reshape([64, 8, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 4, 16])


@gluon.jit
def tile_from_threads(x):
    """Undo `keys_by_thread`: `64 4 16 -> 64 64`."""
    return x.reshape([64, 4, 8, 2]).permute([0, 2, 1, 3]).reshape([64, 64])


@gluon.jit
def first_of_last_dim(x, N: gl.constexpr):
    """Return x[..., 0] for a last dim of size N."""
    if N > 1:
        x = first_of_last_dim(gl.split(x.reshape([64, 4, N // 2, 2]))[0], N // 2)
    return x.reshape([64, 4])


@gluon.jit
def add_products(total, x, y, N: gl.constexpr):
    """Return total + the sum of x * y over their last dim, of size N, as multiply-adds."""
    if N == 1:
        total += x.reshape([64, 4]) * y.reshape([64, 4])
    else:
        x_low, x_high = gl.split(x.reshape([64, 4, N // 2, 2]))
        y_low, y_high = gl.split(y.reshape([64, 4, N // 2, 2]))
        total = add_products(add_products(total, x_low, y_low, N // 2), x_high, y_high, N // 2)
    return total


@gluon.jit
def running_max(most, x, N: gl.constexpr):
    """Return the maximum of `most` and x along its last dim, of size N."""
    if N == 1:
        most = gl.maximum(most, x.reshape([64, 4]))
    else:
        low, high = gl.split(x.reshape([64, 4, N // 2, 2]))
        most = running_max(running_max(most, low, N // 2), high, N // 2)
    return most


@gluon.jit
def sum_row_pairs(x):
    """Add the two rows that each thread holds: `64 64 -> 4 warps, 8 lanes, 64 keys`."""
    low, high = gl.split(x.reshape([4, 2, 8, 64]).permute([0, 2, 3, 1]))
    return low + high
