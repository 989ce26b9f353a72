"""The measures of `reduce` by a kernel laid out for Hopper GPUs, in Gluon; `summary` calls it.

A program keeps 128 rows, as two parts of 64, and walks the keys they see, 64 at a time. Tiles of keys come by the
machine's own copies, some ahead, and while one part is folded the product of the next is under way. Of a product a
thread holds two rows 8 apart, and of each every fourth pair of keys. Rows are dealt out so that those a thread holds,
over both parts, are four neighbours: what is asked of rows is summed over a thread's keys and put together once, at the
end; what is asked of keys and bins is summed over its rows first and then over the lanes of the warp (see `lanes`),
while the next tile is on.

    distance_i = sum_j A abs(i - j)     left of the diagonal i - j, right of it j - i; with i = first + x

Over a row A sums to 1. So only the sum over j has to be taken entry by entry, and that of x needs no more than how much
of the row lies on the left.

Sums leave by atomic adds, keys past the end among them, with nothing to add: outputs have room for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import tiles
from .held import add, add_products, both_rows, first_of, held_by_thread, larger
from .lanes import summed_over_lanes

LOG2E: gl.constexpr = gl.constexpr(tiles.LOG2E.value)
LN2: gl.constexpr = gl.constexpr(tiles.LN2.value)
NEVER: gl.constexpr = gl.constexpr(tiles.NEVER.value)
# A tile as a product leaves it, and vectors along its sides.
PRODUCT: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
BY_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
BY_KEY: gl.constexpr = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
# The pairs of keys a thread holds, and the keys of a pair: 8 x 2 values to sum over the lanes that hold other rows.
RECEIVED_ASM, RECEIVED_IO = (
    gl.constexpr(x) for x in summed_over_lanes((16, 8, 4), tuple(8 * n + e for n in range(8) for e in range(2)))
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
    offset: Any
    low: Any
    reach: Any  # the first key that none of them sees
    scale2: Any


class Tiles(NamedTuple):
    """`count` tiles from `first` on; of careful ones only `then`, and others from `second` on."""

    count: Any
    first: Any
    then: Any
    second: Any


class Outputs(NamedTuple):
    """Where the measures go: pointers, or None for those that nobody asked for."""

    entropy: Any
    received: Any
    largest: Any
    distance: Any
    cells: Any


class Cells(NamedTuple):
    """The shape of the map, and what its sums are to be taken times."""

    rows: Any
    cols: Any
    share: Any


class Measures(NamedTuple):
    """What is known of the rows of a part, for each row and the four lanes that hold it."""

    entropy: Any
    largest: Any
    distance: Any
    left: Any


@gluon.jit
def _row(place, part, n):
    """Which row of the matrix each of a part is."""
    return place * 128 + n // 16 * 32 + n % 8 * 4 + part * 2 + n // 8 % 2


@gluon.jit
def _tile(tiles, n, SIDE: gl.constexpr):
    """Which tile of all is the n-th of these."""
    tile = tiles.first + n
    if SIDE == "careful":
        tile = gl.where(n < tiles.then, tile, tiles.second + n - tiles.then)
    return tile


@gluon.jit
def _fetch(keys, turn, tile, there):
    """Ask for a tile of keys, if it is there."""
    stage = turn % keys.tiles.shape[0]
    mbarrier.expect(keys.arrived.index(stage), 64 * keys.tiles.shape[2] * 2, pred=there)
    wait_for_all()  # what was in its place has been read by every warp
    tma.async_copy_global_to_shared(
        keys.all, [keys.row + tile * 64, keys.col], keys.arrived.index(stage), keys.tiles.index(stage), pred=there
    )


@gluon.jit
def _await(keys, turn, there):
    """Until a tile has come, if it is to come."""
    stage, lap = turn % keys.tiles.shape[0], turn // keys.tiles.shape[0]
    mbarrier.wait(keys.arrived.index(stage), lap % 2, pred=there)


@gluon.jit
def _product(queries, part: gl.constexpr, keys, turn):
    nothing = gl.zeros([64, 64], gl.float32, layout=PRODUCT)
    tile = keys.tiles.index(turn % keys.tiles.shape[0])
    return hopper.warpgroup_mma(queries.index(part), tile.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _send(
    sums, start, place, out, cells,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, MAP_ASM: gl.constexpr, MAP_IO: gl.constexpr,
):  # fmt: skip
    """Add sums over a thread's rows, `4 8 64`, to what their keys received, and to their bins."""
    if out.received is not None:
        key = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout)))
        at = (out.received + start + (key % 8 - key % 2)).to(gl.int64).expand_dims(0).expand_dims(1)
        at += gl.zeros_like(sums).to(gl.int64)
        gl.inline_asm_elementwise(RECEIVED_ASM, RECEIVED_IO, [sums, at], dtype=gl.int32, is_pure=False, pack=16)
    if out.cells is not None:
        bins: gl.constexpr = 64 // WIDTH if WIDTH < 64 else 1
        pairs = sums.reshape([4, 8, bins, 8 // bins, 4, 2]).permute([0, 1, 4, 2, 3, 5])
        pairs = gl.sum(pairs.reshape([4, 8, 4, bins, 16 // bins]), 4) * cells.share
        by_lane: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, pairs.type.layout))
        warp = gl.arange(0, 4, layout=gl.SliceLayout(1, by_lane)).expand_dims(1)
        lane = gl.arange(0, 8, layout=gl.SliceLayout(0, by_lane)).expand_dims(0)
        bin = gl.minimum((place * 128 + warp * 32 + lane * 4) // HEIGHT, cells.rows - 1)
        at = (out.cells + bin * cells.cols + start // WIDTH).to(gl.int64).expand_dims(2).expand_dims(3)
        at += gl.zeros_like(pairs).to(gl.int64)
        gl.inline_asm_elementwise(MAP_ASM, MAP_IO, [pairs, at], dtype=gl.int32, is_pure=False, pack=bins)


@gluon.jit
def _fold(
    s, lse2, measures, part, start, gap, sight, out, SIDE: gl.constexpr, BACKWARD: gl.constexpr
):  # fmt: skip
    """The measures of a part of the rows, with one tile more, and the sums over the rows of each thread."""
    entropy, largest, distance, left = measures
    t = s * sight.scale2 - lse2.expand_dims(1)
    if SIDE == "careful":
        row = _row(sight.place, part, gl.arange(0, 64, layout=BY_ROW))
        seen = gl.minimum(row + sight.offset - sight.low + 1, sight.reach).expand_dims(1)
        t = gl.where((start + gl.arange(0, 64, layout=BY_KEY)).expand_dims(0) < seen, t, NEVER)
        # As if x had been left out on the side that is to count it.
        x = (row - sight.place * 128).to(gl.float32).expand_dims(1)
        gap = gl.abs(gap - x) + (-x if BACKWARD else x)
    p = gl.exp2(t)
    held = held_by_thread(p)
    if out.entropy is not None:
        entropy = add_products(entropy, held, held_by_thread(t), 16)
    if out.largest is not None:
        # Of numbers that are not negative the bits are ordered as they are.
        largest = larger(largest, held.to(gl.int32, bitcast=True), 16)
    if out.distance is not None:
        distance = add_products(distance, held, held_by_thread(gap), 16)
        if SIDE == "left" and not BACKWARD:
            left = add(left, held, 16)
    return Measures(entropy, largest, distance, left), both_rows(p)


@gluon.jit
def _walk(
    tiles, turn, upper, lower, queries, keys, upper_lse2, lower_lse2, sight, out, cells,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, MAP_ASM: gl.constexpr, MAP_IO: gl.constexpr,
    SIDE: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """The measures of both parts of the rows, with these tiles of keys more; `turn` counts tiles over all walks."""
    if tiles.count > 0:
        stages: gl.constexpr = keys.tiles.shape[0]
        for n in gl.static_range(stages - 1):
            tile = _tile(tiles, tiles.count * 0 + n, SIDE)  # a number of the GPU, not of Python
            _fetch(keys, turn + n, tile, n < tiles.count)
        _await(keys, turn, True)
        product = _product(queries, 0, keys, turn)
        nothing = gl.zeros([64, 64], gl.float32, layout=PRODUCT)
        key = gl.arange(0, 64, layout=BY_KEY)
        sign: gl.constexpr = -1 if SIDE == "left" else 1
        sums, sums_of = both_rows(nothing), tiles.first * 64
        for n in range(tiles.count):
            start = _tile(tiles, n, SIDE) * 64
            # From the first row to each key; those a thread holds differ by numbers known beforehand.
            near = ((start - sight.first + key % 8 - key % 2) * sign).to(gl.float32)
            gap = (near + ((key // 8 * 8 + key % 2) * sign).to(gl.float32)).expand_dims(0) + nothing
            s = hopper.warpgroup_mma_wait(0, deps=[product])
            product = _product(queries, 1, keys, turn + n)
            ahead = n + stages - 1
            _fetch(keys, turn + ahead, _tile(tiles, ahead, SIDE), ahead < tiles.count)
            _send(sums, sums_of, sight.place, out, cells, HEIGHT, WIDTH, MAP_ASM, MAP_IO)
            upper, sums = _fold(s, upper_lse2, upper, 0, start, gap, sight, out, SIDE, BACKWARD)
            s = hopper.warpgroup_mma_wait(0, deps=[product])
            _await(keys, turn + n + 1, n + 1 < tiles.count)
            product = _product(queries, 0, keys, turn + n + 1)
            lower, others = _fold(s, lower_lse2, lower, 1, start, gap, sight, out, SIDE, BACKWARD)
            sums += others
            sums_of = start
        _send(sums, sums_of, sight.place, out, cells, HEIGHT, WIDTH, MAP_ASM, MAP_IO)
        hopper.warpgroup_mma_wait(0, deps=[product])
        wait_for_all()
    return turn + gl.maximum(tiles.count, 0), upper, lower


@gluon.jit
def _begin(Q, LSE, queries, place, part: gl.constexpr, q_i, n_i, d: gl.constexpr):
    """Ask for a part of the queries; the log-sum-exp of its rows to base 2."""
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // d, d // 8], [4, 1], [1, 0])
    row = _row(place, part, gl.arange(0, 64, layout=gl.SliceLayout(1, copied)))
    feature = gl.arange(0, d, layout=gl.SliceLayout(0, copied))
    at = Q + (row.to(gl.int64).expand_dims(1) * q_i + feature.expand_dims(0))
    async_copy.async_copy_global_to_shared(queries.index(part), at, mask=(row < n_i).expand_dims(1))
    row = _row(place, part, gl.arange(0, 64, layout=BY_ROW))
    lse = gl.load(LSE + row, mask=row < n_i, other=float("-inf"))
    # Rows that see nothing, and rows past the end: as if their sum were beyond measure.
    return gl.where(lse == float("-inf"), -NEVER, lse * LOG2E)


@gluon.jit
def _end(measures, lse2, place, part: gl.constexpr, bh, n_i, out, BACKWARD: gl.constexpr):
    """Write what is known of a part of the rows."""
    row = _row(place, part, gl.arange(0, 64, layout=BY_ROW))
    at = bh.to(gl.int64) * n_i + row
    if out.entropy is not None:
        gl.store(out.entropy + at, gl.convert_layout(gl.sum(measures.entropy, 1), BY_ROW) * -LN2, mask=row < n_i)
    if out.largest is not None:
        most = gl.convert_layout(gl.max(measures.largest, 1), BY_ROW).to(gl.float32, bitcast=True)
        gl.store(out.largest + at, most, mask=row < n_i)
    if out.distance is not None:
        # Of what x was left out: of all of the row; or of its left, and of the rest with the other sign.
        x = gl.where(lse2 < -NEVER, (row - place * 128).to(gl.float32), 0.0)
        if not BACKWARD:
            x *= 2 * gl.convert_layout(gl.sum(measures.left, 1), BY_ROW) - 1
        gl.store(out.distance + at, gl.convert_layout(gl.sum(measures.distance, 1), BY_ROW) + x, mask=row < n_i)


@gluon.jit
def _there_and_back(program, programs, processors):
    """The same programs, every other round of them, one for each processor, from behind."""
    round = program // processors
    size = gl.minimum(programs - round * processors, processors)
    return gl.where(round % 2 == 1, 2 * round * processors + size - 1 - program, program)


@gluon.jit
def summarize(
    Q, K, LSE, LENGTHS, ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP,
    q_b, q_h, q_i, k_rows_b, k_rows_g, k_cols_g, scale, offset, low, heads, n_i, n_j, places, processors,
    rows, cols, share,
    d: gl.constexpr,
    KV_GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_BIN: gl.constexpr,
    COL_BIN: gl.constexpr,
    MAP_ASM: gl.constexpr,
    MAP_IO: gl.constexpr,
    BACKWARD: gl.constexpr,  # no query sees a key after it
    ALL_AT_ONCE: gl.constexpr,  # every program has its place on a processor from the start
):  # fmt: skip
    """Each of the outputs that is not None, from q, k and the log-sum-exp of every row."""
    program = gl.program_id(0)
    if BACKWARD:  # the last rows take longest, and go first; where nobody waits, long ones go with short ones
        if ALL_AT_ONCE:
            program = _there_and_back(program, gl.num_programs(0), processors)
        attentions = gl.num_programs(0) // places
        place = places - 1 - program // attentions
        bh = program % attentions
    else:
        place = program % places
        bh = program // places
    b = bh // heads
    h = bh % heads
    swizzled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, d], Q.dtype.element_ty)
    queries = gl.allocate_shared_memory(Q.dtype.element_ty, [2, 64, d], swizzled)
    tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, 64, d], swizzled)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(arrived.index(n), count=1)
    Q += b.to(gl.int64) * q_b + h.to(gl.int64) * q_h
    LSE += bh.to(gl.int64) * n_i
    upper_lse2 = _begin(Q, LSE, queries, place, 0, q_i, n_i, d)
    lower_lse2 = _begin(Q, LSE, queries, place, 1, q_i, n_i, d)
    async_copy.commit_group()
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    keys = Keys(K, b * k_rows_b + h // KV_GROUP * k_rows_g, h // KV_GROUP * k_cols_g, tiles, arrived)
    if MAP is not None:
        MAP += bh.to(gl.int64) * rows * cols
    if RECEIVED is not None:
        RECEIVED += bh.to(gl.int64) * n_j
    out = Outputs(ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP)
    cells = Cells(rows, cols, share)
    length = n_j
    if LENGTHS is not None:
        length = gl.minimum(n_j, gl.load(LENGTHS + b))
    # Tiles up to the diagonal, those that cross it, others up to `full`, and those that are partly hidden.
    first = place * 128 + offset
    last = gl.minimum(place * 128 + 128, n_i) - 1 + offset
    # Rows past the end see no more than the last: they are 0, and 0 times a key that is NaN would be NaN.
    reach = gl.maximum(gl.minimum(last - low + 1, length), 0)
    stop = (reach + 63) // 64
    full = gl.minimum(gl.maximum(gl.minimum(first - low + 1, length), 0) // 64, stop)
    crossing = gl.minimum(gl.maximum(first, 0) // 64, full)
    crossed = gl.minimum(gl.maximum(gl.maximum(last, 0) // 64 + 1, crossing), full)
    sight = Sight(place, first, offset, low, reach, scale * LOG2E)
    zero = first_of(held_by_thread(gl.zeros([64, 64], gl.float32, layout=PRODUCT)), 16)
    nothing = Measures(zero, zero.to(gl.int32), zero, zero)
    turn, upper, lower = _walk(
        Tiles(crossing, place * 0, 0, 0), place * 0, nothing, nothing, queries, keys, upper_lse2, lower_lse2,
        sight, out, cells, ROW_BIN, COL_BIN, MAP_ASM, MAP_IO, "left", BACKWARD,
    )  # fmt: skip
    if not BACKWARD:
        turn, upper, lower = _walk(
            Tiles(full - crossed, crossed, 0, 0), turn, upper, lower, queries, keys, upper_lse2, lower_lse2,
            sight, out, cells, ROW_BIN, COL_BIN, MAP_ASM, MAP_IO, "right", BACKWARD,
        )  # fmt: skip
    then = crossed - crossing
    turn, upper, lower = _walk(
        Tiles(then + stop - full, crossing, then, full), turn, upper, lower, queries, keys, upper_lse2, lower_lse2,
        sight, out, cells, ROW_BIN, COL_BIN, MAP_ASM, MAP_IO, "careful", BACKWARD,
    )  # fmt: skip
    _end(upper, upper_lse2, place, 0, bh, n_i, out, BACKWARD)
    _end(lower, lower_lse2, place, 1, bh, n_i, out, BACKWARD)
