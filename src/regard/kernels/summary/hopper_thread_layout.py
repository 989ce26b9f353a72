"""What a thread holds of a tile of q k^T on a Hopper GPU, and sums over it that pass nothing to another thread.

Of a product of 64 rows and 64 keys a thread holds two rows 8 apart, and of each every fourth pair of keys: 16 of them.
This is `shares` in Gluon, which cannot call it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_of(part, n):
    """Which of 128 rows is row n of a part: those a thread holds, over both parts, are four of eight, two apart."""
    return first_row(n) + rows_on(part, n)


@gluon.jit
def first_row(n):
    """The first that the thread holds."""
    return n // 16 * 32 + n % 8 // 2 * 8 + n % 2


@gluon.jit
def rows_on(part, n):
    """How far on from there, which is known beforehand: each part has every other of the four."""
    return part * 2 + n // 8 % 2 * 4


@gluon.jit
def held_by_thread(x):
    """The keys of a row by the thread that holds them: `64 64 -> 64 4 16`."""
    return x.reshape([64, 8, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 4, 16])


@gluon.jit
def as_tile(x):
    """The same in its place again: `64 4 16 -> 64 64`."""
    return x.reshape([64, 4, 8, 2]).permute([0, 2, 1, 3]).reshape([64, 64])


@gluon.jit
def first_of(x, N: gl.constexpr):
    """The first of each thread along the last dim, of N."""
    if N > 1:
        x = first_of(gl.split(x.reshape([64, 4, N // 2, 2]))[0], N // 2)
    return x.reshape([64, 4])


@gluon.jit
def add_products(total, x, y, N: gl.constexpr):
    """total + the sum of x * y over their last dim, of N: a multiply-add each."""
    if N == 1:
        total += x.reshape([64, 4]) * y.reshape([64, 4])
    else:
        x_low, x_high = gl.split(x.reshape([64, 4, N // 2, 2]))
        y_low, y_high = gl.split(y.reshape([64, 4, N // 2, 2]))
        total = add_products(add_products(total, x_low, y_low, N // 2), x_high, y_high, N // 2)
    return total


@gluon.jit
def larger(most, x, N: gl.constexpr):
    """The larger of most and every x along the last dim, of N."""
    if N == 1:
        most = gl.maximum(most, x.reshape([64, 4]))
    else:
        low, high = gl.split(x.reshape([64, 4, N // 2, 2]))
        most = larger(larger(most, low, N // 2), high, N // 2)
    return most


@gluon.jit
def both_rows(x):
    """The sum of the two rows that a thread holds: `64 64 -> 4 warps, 8 lanes, 64 keys`."""
    low, high = gl.split(x.reshape([4, 2, 8, 64]).permute([0, 2, 3, 1]))
    return low + high
