"""Sums over the rows of a tile on their way to what keys received and to the bins of a map, on a Hopper GPU.

A thread has added up its own rows. It puts the sums into shared memory, `4 warps, 8 threads, 64 keys`, and a tile later
takes others from there, all that its warp has of fewer keys: so no lane has to ask another, one value at a time. What
keys received is added to by many programs. Of a map in small bins a warp has whole cells, and writes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# As they are stored, such that what is read or written at once lies in other banks: turned round by thread, or spaced.
# The second takes fewer instructions, and more registers.
SWIZZLED: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[2, 1, 0]))
BESIDE = [
    [0, 0, 1], [0, 0, 2], [0, 0, 4],  # 8 keys,
    [0, 1, 0], [0, 2, 0], [0, 4, 0],  # of each thread; here is the room;
    [0, 0, 8], [0, 0, 16], [0, 0, 32],  # 8 others
    [1, 0, 0], [2, 0, 0],  # and other warps
]  # fmt: skip
SPACED: gl.constexpr = gl.constexpr(gl.PaddedSharedLayout([[64, 8]], BESIDE, [], [4, 8, 64]))
# Halves of cells of 8 x 8, `4 warps, 4 rows of cells, 8 cells, 2 halves`, so that a thread has both of one.
HALVES: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1]],
        lane_bases=[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 2, 0, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 4, 8, 2],
    )
)
# Some rows of a map at once.
CLEARED: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))


class Sums(NamedTuple):
    """Where they are stored, and the first of their keys."""

    stored: Any
    start: Any


class Cells(NamedTuple):
    """The map, or None, its shape, and what its sums are to be taken times."""

    all: Any
    rows: Any
    cols: Any
    share: Any


@gluon.constexpr_function
def is_whole(height: int, width: int) -> bool:
    """Are bins of so many rows and keys within what a warp has of a tile?"""
    return height <= 32 and width <= 64


@gluon.jit
def send(sums, place, received, cells, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Add them to what their keys received, and to the bins of these 128 rows."""
    # Of the 8 that a warp has of each key, a thread takes 8, or half of them where bins are small and ask for less.
    taken_of: gl.constexpr = 8 if cells.all is None or HEIGHT >= 32 else 4
    of_bin: gl.constexpr = HEIGHT // 4 if HEIGHT < 32 else 8
    of: gl.constexpr = of_bin if of_bin < taken_of else taken_of
    layout: gl.constexpr = gl.BlockedLayout(
        [1, taken_of, 16 // taken_of], [1, 8 // taken_of, 4 * taken_of], [4, 1, 1], [2, 1, 0]
    )
    taken = gl.sum(sums.stored.load(layout).reshape([4, 8 // of, of, 64]), 2)
    if received is not None:
        total = gl.sum(taken.reshape([4, 8 // taken_of, taken_of // of, 64]), 2)
        key = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))
        key = key.expand_dims(0).expand_dims(1) + gl.zeros_like(total).to(gl.int32)
        gl.atomic_add(received + (sums.start + key), total, sem="relaxed")
    if cells.all is not None:
        bins: gl.constexpr = 8 // of_bin
        cols: gl.constexpr = 64 // WIDTH if WIDTH < 64 else 1
        if HEIGHT == 8 and WIDTH == 8:  # threads hold halves of two cells, and swap one
            halves = gl.sum(taken.reshape([4, 4, 16, 4]), 3).reshape([4, 4, 8, 2])
            total = gl.sum(gl.convert_layout(halves, HALVES), 3) * cells.share
        else:
            total = gl.sum(taken.reshape([4, 8 // of, cols, 64 // cols]), 3)
            total = gl.sum(total.reshape([4, bins, of_bin // of, cols]), 2) * cells.share
        by_row: gl.constexpr = gl.SliceLayout(2, total.type.layout)
        warp = gl.arange(0, 4, layout=gl.SliceLayout(1, by_row)).expand_dims(1)
        bin = gl.arange(0, bins, layout=gl.SliceLayout(0, by_row)).expand_dims(0)
        row = ((place * 128 + warp * 32 + bin * (4 * of_bin)) // HEIGHT).expand_dims(2)
        col = gl.arange(0, cols, layout=gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))
        col = ((sums.start.to(gl.uint32) // WIDTH).to(gl.int32) + col).expand_dims(0).expand_dims(1)
        if is_whole(HEIGHT, WIDTH):
            there = (row < cells.rows) & (col < cells.cols)
            gl.store(cells.all + (row * cells.cols + col), total, mask=there)
        else:
            at = cells.all + (gl.minimum(row, cells.rows - 1) * cells.cols + col)
            gl.atomic_add(at, total, sem="relaxed")


@gluon.jit
def clear(place, first, cells, HEIGHT: gl.constexpr):
    """Nothing for the bins of these 128 rows from a column on, as none of them sees so far."""
    row = place * (128 // HEIGHT) + gl.arange(0, 128 // HEIGHT, layout=gl.SliceLayout(1, CLEARED))
    row = row.expand_dims(1)
    for start in range(first, cells.cols, 64):
        col = (start + gl.arange(0, 64, layout=gl.SliceLayout(0, CLEARED))).expand_dims(0)
        nothing = gl.zeros([128 // HEIGHT, 64], gl.float32, layout=CLEARED)
        gl.store(cells.all + (row * cells.cols + col), nothing, mask=(row < cells.rows) & (col < cells.cols))
