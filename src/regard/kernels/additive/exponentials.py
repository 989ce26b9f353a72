"""x_f = 1 + exp(2 (q_f + k_f)) of four features at a time, bounded so that their product is a number.

With E = exp(2 q) and F = exp(2 k), made once a token, x = 1 + E F, and four of its inverses take one reciprocal.
The product of four x stays finite while max q + max k <= REACH. Beyond, x stops at 1 + exp(2 REACH), where tanh is 1 to
the last digit. Where E or F could leave the range of float32, past FAR, neither is of use.
"""

from __future__ import annotations

import triton
import triton.language as tl

REACH: tl.constexpr = tl.constexpr(10.5)  # x <= 1 + e^21 < 2^31, four of them < 2^124
MOST: tl.constexpr = tl.constexpr(1.318815734e9)  # 1 + e^21
FAR: tl.constexpr = tl.constexpr(40.0)  # e^80 and e^-80 are inside float32
NEAR: tl.constexpr = tl.constexpr(0)  # the ways to the numbers: four x over one denominator,
BOUNDED: tl.constexpr = tl.constexpr(1)  # the same with x bounded,
ANY: tl.constexpr = tl.constexpr(2)  # an exponential for each pair


@triton.jit
def four(E, F, room_i, room_j, WAY: tl.constexpr):
    """x of four features."""
    x0 = 1 + tl.load(E)[:, None] * tl.load(F)[None, :]
    x1 = 1 + tl.load(E + room_i)[:, None] * tl.load(F + room_j)[None, :]
    x2 = 1 + tl.load(E + 2 * room_i)[:, None] * tl.load(F + 2 * room_j)[None, :]
    x3 = 1 + tl.load(E + 3 * room_i)[:, None] * tl.load(F + 3 * room_j)[None, :]
    if WAY == BOUNDED:
        x0, x1, x2, x3 = _at_most(x0), _at_most(x1), _at_most(x2), _at_most(x3)
    return x0, x1, x2, x3


@triton.jit
def _at_most(x):
    return tl.minimum(x, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def over(x, y, FAST: tl.constexpr):
    """x / y."""
    if FAST:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [y], dtype=tl.float32, is_pure=True, pack=1
        )
        return x * inverse
    return x / y
