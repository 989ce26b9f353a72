"""Which tiles of keys a program of `hopper` takes for its rows, and in what order.

There is no pause between them: those partly hidden, those that cross the diagonal, and those on either side of it,
outwards, the longer side first, are one walk. So programs that start together are at different keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_schedule import divided


class Run(NamedTuple):
    """Tiles one after the other, as turns of a walk: from turn `begin` up to `end`, tile `step * turn + shift`."""

    begin: Any
    end: Any
    shift: Any
    step: Any  # 1 or, to the left, -1


class Walk(NamedTuple):
    """All tiles a program takes: those partly hidden, those that cross the diagonal, and the two sides of it."""

    hiding: Any
    crossing: Any
    long: Any
    short: Any


@gluon.jit
def tile_at(walk, turn, KIND: gl.constexpr):
    """Which tile is on at a turn, of this kind or of one that comes after."""
    tile = turn * walk.short.step + walk.short.shift
    if KIND != "short":
        tile = gl.where(turn < walk.long.end, turn * walk.long.step + walk.long.shift, tile)
    if KIND == "careful":
        tile = gl.where(turn < walk.crossing.end, turn + walk.crossing.shift, tile)
        tile = gl.where(turn < walk.hiding.end, turn + walk.hiding.shift, tile)
    return tile


@gluon.jit
def walk_over(first, last, low, length, portion, of, HIDING: gl.constexpr, BACKWARD: gl.constexpr):
    """The walk of rows at the positions `first` to `last`, or a portion of it; how far they see; the shorter side.

    That is 1 if it is the one on the right, or else -1. If there is but one side, that is on the left, and the longer.
    """
    # Tiles up to the diagonal, those that cross it, others up to `full`, and those that are partly hidden.
    if HIDING:
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
        since, until = divided(stop * portion, of)[0], divided(stop * (portion + 1), of)[0]
    begin = portion * 0
    side = begin + 1.0
    if not BACKWARD:
        side = gl.where(crossing >= full - crossed, 1.0, -1.0)
    on_left = side > 0
    right = begin + 1
    outward = gl.where(on_left, -right, right)
    hiding = Run(begin, begin, begin, right)
    if HIDING:
        hiding = _run(begin, full, stop, since, until, right)
    over = _run(hiding.end, crossing, crossed, since, until, right)
    long = _run(over.end, gl.where(on_left, 0, crossed), gl.where(on_left, crossing, full), since, until, outward)
    short = long
    if not BACKWARD:
        short = _run(long.end, gl.where(on_left, crossed, 0), gl.where(on_left, full, crossing), since, until, -outward)
    return Walk(hiding, over, long, short), reach, side


@gluon.jit
def _run(begin, first, stop, since, until, step):
    """Those of the tiles from `first` up to `stop` that are within the other two, from turn `begin` on."""
    first = gl.minimum(gl.maximum(first, since), until)
    stop = gl.minimum(gl.maximum(stop, since), until)
    return Run(begin, begin + stop - first, gl.where(step > 0, first - begin, begin + stop - 1), step)
