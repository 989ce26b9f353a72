"""The order in which a program of the Hopper kernel visits the key tiles of its rows.

One sequence without a pause: partly hidden tiles, tiles that cross the diagonal, then the two sides of the diagonal
outwards, the longer side first. Programs that start together are therefore at different keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_schedule import unsigned_divmod


class TileRun(NamedTuple):
    """Consecutive tiles: at step n, begin <= n < end, the program visits tile `direction * n + shift`."""

    begin: Any
    end: Any
    shift: Any
    direction: Any  # 1, or -1 to the left


class TileOrder(NamedTuple):
    """All tiles of a program in order: partly hidden, crossing the diagonal, the longer and the shorter side."""

    partial: Any
    crossing: Any
    long: Any
    short: Any


@gluon.jit
def tile_at_step(order, step, KIND: gl.constexpr):
    """Return the tile visited at a step of the phase KIND ("careful", "long", "short") or a later phase."""
    tile = step * order.short.direction + order.short.shift
    if KIND != "short":
        tile = gl.where(step < order.long.end, step * order.long.direction + order.long.shift, tile)
    if KIND == "careful":
        tile = gl.where(step < order.crossing.end, step + order.crossing.shift, tile)
        tile = gl.where(step < order.partial.end, step + order.partial.shift, tile)
    return tile


@gluon.jit
def order_tiles(first, last, low, length, portion, of, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the tile order of rows at positions first..last (or a portion of it), their reach, and the shorter side.

    The reach is the first key that none of the rows sees. The side is 1.0 if the right of the diagonal is the shorter
    side, else -1.0; if there is only one side, it is the left one, and the longer.
    """
    # Tiles up to `crossing` lie left of the diagonal, tiles up to `crossed` on it, tiles up to `full` right of it, and
    # tiles up to `stop` are partly hidden.
    if MASKED:
        reach = gl.maximum(gl.minimum(last - low + 1, length), 0)
        stop = (reach + 63) // 64
        full = gl.minimum(gl.maximum(gl.minimum(first - low + 1, length), 0) // 64, stop)
    else:
        reach = length
        stop = length // 64
        full = stop
    crossing = gl.minimum(gl.maximum(first, 0) // 64, full)
    crossed = gl.minimum(gl.maximum(gl.maximum(last, 0) // 64 + 1, crossing), full)
    since, until = stop * 0, stop
    if of > 1:
        since, until = unsigned_divmod(stop * portion, of)[0], unsigned_divmod(stop * (portion + 1), of)[0]
    begin = portion * 0
    side = begin + 1.0
    if not CAUSAL:
        side = gl.where(crossing >= full - crossed, 1.0, -1.0)
    on_left = side > 0
    right = begin + 1
    outward = gl.where(on_left, -right, right)
    partial = TileRun(begin, begin, begin, right)
    if MASKED:
        partial = _tile_run(begin, full, stop, since, until, right)
    over = _tile_run(partial.end, crossing, crossed, since, until, right)
    long = _tile_run(over.end, gl.where(on_left, 0, crossed), gl.where(on_left, crossing, full), since, until, outward)
    short = long
    if not CAUSAL:
        short = _tile_run(
            long.end, gl.where(on_left, crossed, 0), gl.where(on_left, full, crossing), since, until, -outward
        )
    return TileOrder(partial, over, long, short), reach, side


@gluon.jit
def _tile_run(begin, first, stop, since, until, direction):
    """Return the run of tiles first..stop that lie within since..until, from step `begin` on."""
    first = gl.minimum(gl.maximum(first, since), until)
    stop = gl.minimum(gl.maximum(stop, since), until)
    end = begin + stop - first
    return TileRun(begin, end, gl.where(direction > 0, first - begin, begin + stop - 1), direction)
