"""The measures of `reduce` by a kernel laid out for Hopper GPUs, in Gluon; `summary` calls it.

A program keeps 128 rows, as two parts of 64, and walks the keys they see, 64 at a time. Tiles of keys come by the
machine's own copies, some ahead, and while one part is folded the product of the next is under way. Queries stay in
registers: a product that read them, too, from shared memory would wait for it. Of a product a thread holds two rows 8
apart, and of each every fourth pair of keys. Rows are dealt out so that those a thread holds, over both parts, are four
of eight neighbours, two apart: what is asked of rows is summed over a thread's keys and put together once, at the end;
what is asked of keys and bins is summed over its rows first and then over those of the warp (see `sums`), while the
next tile is on.
There is no pause between the tiles (see `walk`). Programs that start together are at different keys, and seldom add to
the same.

    distance_i = sum_j A abs(i - j)     left of the diagonal i - j, right of it j - i; with i = first + x

Over a row A sums to 1. So x can be left out of the distances on the longer side and come in once, at the end, if it is
taken off twice on the shorter one. There entries differ by row, but numbers repeat: keys come by eights, twice x by
fours.

Programs may share the keys of rows, so all sums leave by atomic adds. Keys past the end get nothing, but do get it:
outputs have room for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .. import tiles
from .hopper_column_sums import SPACED, SWIZZLED, Cells, Sums, clear, is_whole, send
from .hopper_pdl import wait_for_last
from .hopper_schedule import Deal, block_of, divided, there_and_back
from .hopper_thread_layout import (
    add_products,
    as_tile,
    both_rows,
    first_of,
    first_row,
    held_by_thread,
    larger,
    row_of,
    rows_on,
)
from .hopper_tile_order import Run, tile_at, walk_over

LOG2E: gl.constexpr = gl.constexpr(tiles.LOG2E.value)
LN2: gl.constexpr = gl.constexpr(tiles.LN2.value)
NEVER: gl.constexpr = gl.constexpr(tiles.NEVER.value)
# A tile as a product leaves it, and vectors along its sides.
PRODUCT: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
BY_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
BY_KEY: gl.constexpr = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
# What is known of 64 rows in four lanes and two parts, one row a lane.
BY_LANE: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0]],
        lane_bases=[[8, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 2],
    )
)
wait_for_all = getattr(gl, "barrier", None) or gl.thread_barrier  # its name in Triton 3.7, and in 3.6


class Keys(NamedTuple):
    """All keys, where those of this head begin; the tiles of them at hand, one a stage; and whether they have come."""

    all: Any
    row: Any
    col: Any
    tiles: Any
    arrived: Any


class Sight(NamedTuple):
    """What rows these are, which keys they see, and how they compare them."""

    place: Any
    first: Any  # the position of the first row
    low: Any
    reach: Any  # the first key that none of them sees, or None if they see all there are
    scale2: Any
    side: Any  # of the diagonal, that is the shorter one: 1 if it is on the right, or else -1


class Outputs(NamedTuple):
    """Where the measures of rows go: pointers, or None for those that nobody asked for."""

    entropy: Any
    largest: Any
    distance: Any


class Measures(NamedTuple):
    """What is known of the rows of a part, for each row and the four lanes that hold it."""

    entropy: Any
    largest: Any
    distance: Any


@gluon.jit
def _stage(keys, turn):
    """Where the tile of a turn is held, and whether it is there for the second time of two; turns are not negative."""
    turn = turn.to(gl.uint32)
    return (turn % keys.tiles.shape[0]).to(gl.int32), (turn // keys.tiles.shape[0] % 2).to(gl.int32)


@gluon.jit
def _ask(keys, walk, turn, KIND: gl.constexpr):
    """Ask for the tile of a turn, if there is one."""
    stage, there = _stage(keys, turn)[0], turn < walk.short.end
    mbarrier.expect(keys.arrived.index(stage), 64 * keys.tiles.shape[2] * 2, pred=there)
    at = [keys.row + tile_at(walk, turn, KIND) * 64, keys.col]
    tma.async_copy_global_to_shared(keys.all, at, keys.arrived.index(stage), keys.tiles.index(stage), pred=there)


@gluon.jit
def _await(keys, walk, turn):
    """Until the tile of a turn has come, if there is one."""
    stage, again = _stage(keys, turn)
    mbarrier.wait(keys.arrived.index(stage), again, pred=turn < walk.short.end)


@gluon.jit
def _product(queries, part: gl.constexpr, keys, turn):
    nothing = gl.zeros([64, 64], gl.float32, layout=PRODUCT)
    tile = keys.tiles.index(_stage(keys, turn)[0])
    return hopper.warpgroup_mma(queries[part], tile.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _gaps(part, start, first, KIND: gl.constexpr):
    """From the first row to each key, and twice from there to each row off, if that is asked for.

    Those of a thread differ by numbers known beforehand.
    """
    key = gl.arange(0, 64, layout=BY_KEY).expand_dims(0)
    row = gl.arange(0, 64, layout=BY_ROW).expand_dims(1)
    near = start - first + key % 8 - key % 2 + row * 0
    apart = key // 8 * 8 + key % 2 + row * 0
    if KIND == "short":
        near -= 2 * first_row(row)
        apart -= 2 * rows_on(part, row)
    return near.to(gl.float32) + apart.to(gl.float32)


@gluon.jit
def _fold(s, lse2, measures, part, start, sight, out, KIND: gl.constexpr):
    """The measures of a part of the rows, with one tile more, and the sums over the rows of each thread."""
    t = s * sight.scale2 - lse2.expand_dims(1)
    gap = _gaps(part, start, sight.first, KIND)
    if KIND == "careful":
        row = row_of(part, gl.arange(0, 64, layout=BY_ROW))
        if sight.reach is not None:
            seen = gl.minimum(sight.first + row - sight.low + 1, sight.reach).expand_dims(1)
            t = gl.where((start + gl.arange(0, 64, layout=BY_KEY)).expand_dims(0) < seen, t, NEVER)
        x = row.to(gl.float32).expand_dims(1)
        gap = gl.abs(gap - x) - x * sight.side
    measures, p = _weigh(measures, held_by_thread(t), held_by_thread(gap), out, 16)
    return measures, both_rows(as_tile(p))


@gluon.jit
def _weigh(measures, t, gap, out, N: gl.constexpr):
    """The measures with N keys of each thread more, and A of them; half at a time, which spreads the exponentials."""
    if N > 8:
        t_low, t_high = gl.split(t.reshape([64, 4, N // 2, 2]))
        gap_low, gap_high = gl.split(gap.reshape([64, 4, N // 2, 2]))
        measures, p_low = _weigh(measures, t_low, gap_low, out, N // 2)
        measures, p_high = _weigh(measures, t_high, gap_high, out, N // 2)
        p = gl.join(p_low, p_high).reshape([64, 4, N])
    else:
        entropy, largest, distance = measures
        p = gl.exp2(t)
        if out.largest is not None:
            # Of numbers that are not negative the bits are ordered as they are.
            largest = larger(largest, p.to(gl.int32, bitcast=True), N)
        if out.distance is not None:
            distance = add_products(distance, p, gap, N)
        if out.entropy is not None:
            entropy = add_products(entropy, p, t, N)
        measures = Measures(entropy, largest, distance)
    return measures, p


@gluon.jit
def _turned(measures, side):
    """Distances to the left (-1) as if they were to the right (1), or back again."""
    return Measures(measures.entropy, measures.largest, measures.distance * side)


@gluon.jit
def _take(
    run, side, walk, product, sums, upper, lower, queries, keys, upper_lse2, lower_lse2, sight, out, received, cells,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The measures of both parts of the rows, with the tiles of a run more; a product is under way before and after.

    `KIND` is "careful" if tiles may hide keys or cross the diagonal, or else the side they are on, "long" or "short".
    """
    stored, sums_of = sums
    upper, lower = _turned(upper, side), _turned(lower, side)
    tile = run.begin * run.step + run.shift
    for turn in range(run.begin, run.end):
        start = (tile_at(walk, turn, KIND) if KIND == "careful" else tile) * 64
        s = hopper.warpgroup_mma_wait(0, deps=[product])
        product = _product(queries, 1, keys, turn)
        wait_for_all()  # every warp has read what is in its place
        _ask(keys, walk, turn + keys.tiles.shape[0] - 1, KIND)
        upper, of_upper = _fold(s, upper_lse2, upper, 0, start, sight, out, KIND)
        send(Sums(stored, sums_of), sight.place, received, cells, HEIGHT, WIDTH)
        s = hopper.warpgroup_mma_wait(0, deps=[product])
        _await(keys, walk, turn + 1)
        product = _product(queries, 0, keys, turn + 1)
        lower, of_lower = _fold(s, lower_lse2, lower, 1, start, sight, out, KIND)
        stored.store(of_upper + of_lower)
        sums_of = start
        tile += run.step
    return product, Sums(stored, sums_of), _turned(upper, side), _turned(lower, side)


@gluon.jit
def _begin(Q, LSE, copied, place, part: gl.constexpr, q_i, n_i, d: gl.constexpr):
    """Ask for a part of the queries; the log-sum-exp of its rows to base 2."""
    by_eight: gl.constexpr = gl.BlockedLayout([1, 8], [256 // d, d // 8], [4, 1], [1, 0])
    row = place * 128 + row_of(part, gl.arange(0, 64, layout=gl.SliceLayout(1, by_eight)))
    feature = gl.arange(0, d, layout=gl.SliceLayout(0, by_eight))
    at = Q + (row.to(gl.int64).expand_dims(1) * q_i + feature.expand_dims(0))
    async_copy.async_copy_global_to_shared(copied.index(part), at, mask=(row < n_i).expand_dims(1))
    row = place * 128 + row_of(part, gl.arange(0, 64, layout=BY_ROW))
    lse = gl.load(LSE + row, mask=row < n_i, other=float("-inf"))
    # Rows that see nothing, and rows past the end: as if their sum were beyond measure.
    return gl.where(lse == float("-inf"), -NEVER, lse * LOG2E)


@gluon.jit
def _by_lane(upper, lower):
    """Of both parts `64 4`, what four lanes hold of four rows, so that each has all of one: `64 4 2`."""
    return gl.convert_layout(gl.join(upper, lower), BY_LANE)


@gluon.jit
def _end(upper, lower, upper_lse2, lower_lse2, sight, rest, bh, n_i, out):
    """Add what is known of the rows; `rest` is 1, as rows sum to, in one of the programs that share them."""
    by_part: gl.constexpr = gl.SliceLayout(1, BY_LANE)
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, by_part)).expand_dims(1)
    x = row_of(gl.arange(0, 2, layout=gl.SliceLayout(0, by_part)).expand_dims(0), n)
    row = sight.place * 128 + x
    at = bh.to(gl.int64) * n_i + row
    if out.entropy is not None:
        entropy = gl.sum(_by_lane(upper.entropy, lower.entropy), 1) * -LN2
        gl.atomic_add(out.entropy + at, entropy, mask=row < n_i, sem="relaxed")
    if out.largest is not None:
        most = gl.max(_by_lane(upper.largest, lower.largest), 1)
        bits = out.largest.to(gl.pointer_type(gl.int32), bitcast=True)
        gl.atomic_max(bits + at, most, mask=row < n_i, sem="relaxed")
    if out.distance is not None:
        sums_to_1 = gl.convert_layout(gl.join(upper_lse2, lower_lse2), by_part) < -NEVER
        x = gl.where(sums_to_1, x.to(gl.float32), 0.0) * sight.side * rest
        distance = gl.sum(_by_lane(upper.distance, lower.distance), 1) + x
        gl.atomic_add(out.distance + at, distance, mask=row < n_i, sem="relaxed")


@gluon.jit(do_not_specialize=["first", "to_first", "second", "to_second", "to_rest"])
def summarize(
    Q, K, LSE, LENGTHS, ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP,
    q_b, q_h, q_i, k_rows_b, k_rows_g, k_cols_g, scale, offset, low, heads, n_i, n_j, places, attentions, processors,
    first, to_first, second, to_second, to_rest, rows, cols, share,
    d: gl.constexpr,
    KV_GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    SPACED_SUMS: gl.constexpr,
    ROW_BIN: gl.constexpr,
    COL_BIN: gl.constexpr,
    BACKWARD: gl.constexpr,  # no query sees a key after it
    HIDING: gl.constexpr,  # some query does not see all keys, or the last tile is not full
    ALL_AT_ONCE: gl.constexpr,  # every program has its place on a processor from the start
):  # fmt: skip
    """Each of the outputs that is not None, from q, k and the log-sum-exp of every row; zeros are added to.

    It may begin while the kernel before runs (see `follow`), if that is the one that clears the outputs.

    The first blocks of 128 rows have `to_first` programs each, `second` others `to_second`, and the rest `to_rest`.
    """
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(arrived.index(n), count=1)
    hopper.fence_async_shared()
    block, portion, of = block_of(gl.program_id(0), Deal(first, to_first, second, to_second, to_rest))
    if BACKWARD:  # the last rows take longest, and go first; where nobody waits, long ones go with short ones
        if ALL_AT_ONCE:
            block = there_and_back(block, gl.num_programs(0), processors)
        from_end, bh = divided(block, attentions)
        place = places - 1 - from_end
    else:
        bh, place = divided(block, places)
    b, h = divided(bh, heads)
    swizzled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, d], Q.dtype.element_ty)
    copied = gl.allocate_shared_memory(Q.dtype.element_ty, [2, 64, d], swizzled)
    tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, 64, d], swizzled)
    stored = gl.allocate_shared_memory(gl.float32, [4, 8, 64], SPACED if SPACED_SUMS else SWIZZLED)
    Q += b.to(gl.int64) * q_b + h.to(gl.int64) * q_h
    LSE += bh.to(gl.int64) * n_i
    upper_lse2 = _begin(Q, LSE, copied, place, 0, q_i, n_i, d)
    async_copy.commit_group()
    lower_lse2 = _begin(Q, LSE, copied, place, 1, q_i, n_i, d)
    async_copy.commit_group()
    keys = Keys(K, b * k_rows_b + h // KV_GROUP * k_rows_g, h // KV_GROUP * k_cols_g, tiles, arrived)
    if MAP is not None:
        MAP += bh.to(gl.int64) * rows * cols
    if RECEIVED is not None:
        RECEIVED += bh.to(gl.int64) * n_j
    out = Outputs(ENTROPY, LARGEST, DISTANCE)
    cells = Cells(MAP, rows, cols, share)
    length = n_j
    if LENGTHS is not None:
        length = gl.minimum(n_j, gl.load(LENGTHS + b))
    position = place * 128 + offset
    # Rows past the end see no more than the last: they are 0, and 0 times a key that is NaN would be NaN.
    last = gl.minimum(place * 128 + 128, n_i) - 1 + offset
    walk, reach, side = walk_over(position, last, low, length, portion, of, HIDING, BACKWARD)
    sight = Sight(place, position, low, reach if HIDING else None, scale * LOG2E, side)
    begin = walk.hiding.begin
    for turn in gl.static_range(STAGES - 1):
        _ask(keys, walk, begin + turn, "careful")
    operand: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    async_copy.wait_group(1)
    wait_for_all()
    of_upper = copied.index(0).load(operand)
    _await(keys, walk, begin)
    product = _product((of_upper,), 0, keys, begin)
    async_copy.wait_group(0)
    wait_for_all()
    queries = (of_upper, copied.index(1).load(operand))
    wait_for_last()  # for the zeros
    if HIDING and MAP is not None and is_whole(ROW_BIN, COL_BIN):
        clear(place, gl.where(portion == 0, (reach + 63) // 64 * (64 // COL_BIN), cols), cells, ROW_BIN)
    nothing = gl.zeros([64, 64], gl.float32, layout=PRODUCT)
    stored.store(both_rows(nothing))
    sums = Sums(stored, tile_at(walk, begin, "careful") * 64)
    zero = first_of(held_by_thread(nothing), 16)
    upper = Measures(zero, zero.to(gl.int32), zero)
    lower = upper
    product, sums, upper, lower = _take(
        Run(begin, walk.crossing.end, 0, 1), 1.0, walk, product, sums, upper, lower, queries, keys, upper_lse2,
        lower_lse2, sight, out, RECEIVED, cells, ROW_BIN, COL_BIN, "careful",
    )  # fmt: skip
    product, sums, upper, lower = _take(
        walk.long, -side, walk, product, sums, upper, lower, queries, keys, upper_lse2, lower_lse2,
        sight, out, RECEIVED, cells, ROW_BIN, COL_BIN, "long",
    )  # fmt: skip
    if not BACKWARD:
        product, sums, upper, lower = _take(
            walk.short, side, walk, product, sums, upper, lower, queries, keys, upper_lse2, lower_lse2,
            sight, out, RECEIVED, cells, ROW_BIN, COL_BIN, "short",
        )  # fmt: skip
    hopper.warpgroup_mma_wait(0, deps=[product])
    if walk.short.end > 0:
        wait_for_all()
        send(sums, place, RECEIVED, cells, ROW_BIN, COL_BIN)
    rest = gl.where(portion == 0, 1.0, 0.0)
    _end(upper, lower, upper_lse2, lower_lse2, sight, rest, bh, n_i, out)
