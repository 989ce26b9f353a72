"""The summary kernel for Hopper GPUs, in Gluon: the measures of `generic`, laid out for that machine.

`hopper_launcher` launches it.

A program keeps 128 rows, as two parts of 64, and loops over the keys they see, 64 at a time. Tiles of keys arrive by
TMA copies, several ahead; while one part is reduced, the product of the other is computed. Queries stay in registers: a
product that also read them from shared memory would wait for it.

- Each thread holds two rows, 8 apart, of a 64 x 64 product, and every fourth pair of their keys. Rows are ordered so
  that those a thread holds, over both parts, are four of eight neighbours, two apart.
- Measures per row are summed over a thread's keys and combined once, at the end.
- Measures per key and bin are summed over a thread's rows first, then over those of the warp (`hopper_column_sums`),
  while the next tile is computed.
- There is no pause between tiles (`hopper_tile_order`). Programs that start together are at different keys, and rarely
  add to the same ones.

Distances need few operations because rows sum to 1:

    distance_i = sum_j A abs(i - j)     left of the diagonal i - j, right of it j - i; with i = first + x

x can be left out of the distances on the longer side and added once, at the end, if it is subtracted twice on the
shorter one. There entries differ by row, but numbers repeat: keys come by eights, twice x by fours.

Several programs may share the keys of a block of rows, so all sums are written by atomic adds. Out-of-range keys
receive +0; output buffers are padded so that these adds are in bounds.

Limits: see `hopper_launcher`. Untested without a Hopper GPU: there, tests only compile the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .. import tiles
from .hopper_column_sums import (
    PADDED,
    SWIZZLED,
    ColumnSums,
    MapCells,
    add_column_sums,
    cells_fit_in_warp,
    clear_cells,
)
from .hopper_pdl import wait_for_previous_kernel
from .hopper_schedule import WorkSplit, block_of_program, serpentine_order, unsigned_divmod
from .hopper_thread_layout import (
    add_products,
    first_of_last_dim,
    first_row_of_thread,
    keys_by_thread,
    row_in_block,
    rows_after_first,
    running_max,
    sum_row_pairs,
    tile_from_threads,
)
from .hopper_tile_order import TileRun, order_tiles, tile_at_step

LOG2E: gl.constexpr = gl.constexpr(tiles.LOG2E.value)
LN2: gl.constexpr = gl.constexpr(tiles.LN2.value)
LOG2_ZERO: gl.constexpr = gl.constexpr(tiles.LOG2_ZERO.value)
# The layout of a product, and of vectors along its sides.
PRODUCT: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
BY_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
BY_KEY: gl.constexpr = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
# The layout of numbers per row, `64 rows, 4 lanes, 2 parts`, in which each lane has all numbers of one row.
BY_LANE: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0]],
        lane_bases=[[8, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 2],
    )
)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its names in Triton 3.7 and 3.6


class KeyTiles(NamedTuple):
    """The tensor descriptor of all keys, where this head begins in it, and the ring of key tiles in shared memory."""

    all: Any
    row: Any
    col: Any
    tiles: Any  # one tile per pipeline stage
    arrived: Any  # one mbarrier per stage


class RowBlock(NamedTuple):
    """The rows of a program, the keys they see, and constants of their measures."""

    place: Any  # index of the block of 128 rows
    first: Any  # position of the first row
    low: Any
    reach: Any  # the first key that none of the rows sees, or None if they see all keys
    scale2: Any
    side: Any  # the shorter side of the diagonal: 1 if it is the right one, else -1


class RowOutputs(NamedTuple):
    """Pointers to the measures per row; None if not requested."""

    entropy: Any
    largest: Any
    distance: Any


class RowMeasures(NamedTuple):
    """The measures so far of the rows of a part, for each row and the four lanes that hold it."""

    entropy: Any
    largest: Any
    distance: Any


@gluon.jit
def _stage(keys, step):
    """Return the pipeline stage of a step, and the mbarrier phase it waits for; steps are not negative."""
    step = step.to(gl.uint32)
    return (step % keys.tiles.shape[0]).to(gl.int32), (step // keys.tiles.shape[0] % 2).to(gl.int32)


@gluon.jit
def _start_copy(keys, order, step, KIND: gl.constexpr):
    """Start the copy of the key tile of a step, if the step exists."""
    stage, exists = _stage(keys, step)[0], step < order.short.end
    mbarrier.expect(keys.arrived.index(stage), 64 * keys.tiles.shape[2] * 2, pred=exists)
    at = [keys.row + tile_at_step(order, step, KIND) * 64, keys.col]
    tma.async_copy_global_to_shared(keys.all, at, keys.arrived.index(stage), keys.tiles.index(stage), pred=exists)


@gluon.jit
def _await_copy(keys, order, step):
    """Wait until the key tile of a step has arrived, if the step exists."""
    stage, phase = _stage(keys, step)
    mbarrier.wait(keys.arrived.index(stage), phase, pred=step < order.short.end)


@gluon.jit
def _start_product(queries, part: gl.constexpr, keys, step):
    """Start the product of a part of the queries; wide ones come as slices of 64 features, those past d left out."""
    product = gl.zeros([64, 64], gl.float32, layout=PRODUCT)
    tile = keys.tiles.index(_stage(keys, step)[0])
    if tile.shape[1] <= 128:
        product = hopper.warpgroup_mma(queries[part], tile.permute([1, 0]), product, use_acc=False, is_async=True)
    else:
        for n in gl.static_range(len(queries[part])):
            of_keys = tile.slice(n * 64, 64, 1).permute([1, 0])
            product = hopper.warpgroup_mma(queries[part][n], of_keys, product, use_acc=n > 0, is_async=True)
    return product


@gluon.jit
def _feature_slices(tile, SLICES: gl.constexpr):
    """Return slices of 64 features of a tile in shared memory, 3 or 4."""
    slices = tile.slice(0, 64, 1), tile.slice(64, 64, 1), tile.slice(128, 64, 1)
    if SLICES == 4:
        slices = slices[0], slices[1], slices[2], tile.slice(192, 64, 1)  # type: ignore[assignment]
    return slices


@gluon.jit
def _load_slices(slices, LAYOUT: gl.constexpr):
    """Return the slices in registers."""
    loaded = slices[0].load(LAYOUT), slices[1].load(LAYOUT), slices[2].load(LAYOUT)
    if len(slices) == 4:
        loaded = loaded[0], loaded[1], loaded[2], slices[3].load(LAYOUT)  # type: ignore[assignment]
    return loaded


@gluon.jit
def _gaps(part, start, first, KIND: gl.constexpr):
    """Return key position - first row position; on the shorter side, minus twice (row - first row).

    The entries of a thread differ by numbers known at compile time.
    """
    key = gl.arange(0, 64, layout=BY_KEY).expand_dims(0)
    row = gl.arange(0, 64, layout=BY_ROW).expand_dims(1)
    near = start - first + key % 8 - key % 2 + row * 0
    apart = key // 8 * 8 + key % 2 + row * 0
    if KIND == "short":
        near -= 2 * first_row_of_thread(row)
        apart -= 2 * rows_after_first(part, row)
    return near.to(gl.float32) + apart.to(gl.float32)


@gluon.jit
def _reduce_part(s, lse2, measures, part, start, block, out, KIND: gl.constexpr):
    """Return the measures of a part of the rows with one tile added, and the tile's sums over each thread's rows."""
    t = s * block.scale2 - lse2.expand_dims(1)
    gap = _gaps(part, start, block.first, KIND)
    if KIND == "careful":
        row = row_in_block(part, gl.arange(0, 64, layout=BY_ROW))
        if block.reach is not None:
            seen = gl.minimum(block.first + row - block.low + 1, block.reach).expand_dims(1)
            t = gl.where((start + gl.arange(0, 64, layout=BY_KEY)).expand_dims(0) < seen, t, LOG2_ZERO)
        x = row.to(gl.float32).expand_dims(1)
        gap = gl.abs(gap - x) - x * block.side
    measures, p = _add_keys(measures, keys_by_thread(t), keys_by_thread(gap), out, 16)
    return measures, sum_row_pairs(tile_from_threads(p))


@gluon.jit
def _add_keys(measures, t, gap, out, N: gl.constexpr):
    """Return the measures with N keys per thread added, and A of these keys; by halves, to spread the exponentials."""
    if N > 8:
        t_low, t_high = gl.split(t.reshape([64, 4, N // 2, 2]))
        gap_low, gap_high = gl.split(gap.reshape([64, 4, N // 2, 2]))
        measures, p_low = _add_keys(measures, t_low, gap_low, out, N // 2)
        measures, p_high = _add_keys(measures, t_high, gap_high, out, N // 2)
        p = gl.join(p_low, p_high).reshape([64, 4, N])
    else:
        entropy, largest, distance = measures
        p = gl.exp2(t)
        if out.largest is not None:
            # The bits of non-negative floats are ordered like the floats.
            largest = running_max(largest, p.to(gl.int32, bitcast=True), N)
        if out.distance is not None:
            distance = add_products(distance, p, gap, N)
        if out.entropy is not None:
            entropy = add_products(entropy, p, t, N)
        measures = RowMeasures(entropy, largest, distance)
    return measures, p


@gluon.jit
def _flip_distances(measures, side):
    """Multiply the distances by `side`, -1 to count distances to the left like those to the right, and back."""
    return RowMeasures(measures.entropy, measures.largest, measures.distance * side)


@gluon.jit
def _reduce_run(
    run, side, order, product, sums, upper, lower, queries, keys, upper_lse2, lower_lse2, block, out, received, cells,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Add the tiles of a run to the measures of both parts of the rows; a product is in flight before and after.

    `KIND` is "careful" if tiles may hide keys or cross the diagonal, else the side they are on, "long" or "short".
    """
    stored, sums_start = sums
    upper, lower = _flip_distances(upper, side), _flip_distances(lower, side)
    tile = run.begin * run.direction + run.shift
    for step in range(run.begin, run.end):
        start = (tile_at_step(order, step, KIND) if KIND == "careful" else tile) * 64
        s = hopper.warpgroup_mma_wait(0, deps=[product])
        product = _start_product(queries, 1, keys, step)
        barrier()  # every warp has read the stage that the next copy overwrites
        _start_copy(keys, order, step + keys.tiles.shape[0] - 1, KIND)
        upper, sums_of_upper = _reduce_part(s, upper_lse2, upper, 0, start, block, out, KIND)
        add_column_sums(ColumnSums(stored, sums_start), block.place, received, cells, HEIGHT, WIDTH)
        s = hopper.warpgroup_mma_wait(0, deps=[product])
        _await_copy(keys, order, step + 1)
        product = _start_product(queries, 0, keys, step + 1)
        lower, sums_of_lower = _reduce_part(s, lower_lse2, lower, 1, start, block, out, KIND)
        stored.store(sums_of_upper + sums_of_lower)
        sums_start = start
        tile += run.direction
    return product, ColumnSums(stored, sums_start), _flip_distances(upper, side), _flip_distances(lower, side)


@gluon.jit
def _start_queries(Q, LSE, copied, place, part: gl.constexpr, q_i, n_i, d, D: gl.constexpr):
    """Start the copy of a part of the queries; return log2 of each row's sum of exponentials."""
    by_eight: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = place * 128 + row_in_block(part, gl.arange(0, 64, layout=gl.SliceLayout(1, by_eight)))
    feature = gl.arange(0, D, layout=gl.SliceLayout(0, by_eight))
    at = Q + (row.to(gl.int64).expand_dims(1) * q_i + feature.expand_dims(0))
    inside = (row < n_i).expand_dims(1) & (feature // 8 < d // 8).expand_dims(0)
    async_copy.async_copy_global_to_shared(copied, at, mask=inside)
    row = place * 128 + row_in_block(part, gl.arange(0, 64, layout=BY_ROW))
    lse = gl.load(LSE + row, mask=row < n_i, other=float("-inf"))
    # Rows that see nothing, and rows past the end, get an infinite sum, so that their weights are 0.
    return gl.where(lse == float("-inf"), -LOG2_ZERO, lse * LOG2E)


@gluon.jit
def _by_lane(upper, lower):
    """Join both parts, `64 4` each, and give each lane all four numbers of one row: `64 4 2`."""
    return gl.convert_layout(gl.join(upper, lower), BY_LANE)


@gluon.jit
def _write_rows(upper, lower, upper_lse2, lower_lse2, block, rest, bh, n_i, out):
    """Add the measures per row to the outputs; `rest` is 1 in one of the programs that share the rows, else 0."""
    by_part: gl.constexpr = gl.SliceLayout(1, BY_LANE)
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, by_part)).expand_dims(1)
    x = row_in_block(gl.arange(0, 2, layout=gl.SliceLayout(0, by_part)).expand_dims(0), n)
    row = block.place * 128 + x
    at = bh.to(gl.int64) * n_i + row
    if out.entropy is not None:
        entropy = gl.sum(_by_lane(upper.entropy, lower.entropy), 1) * -LN2
        gl.atomic_add(out.entropy + at, entropy, mask=row < n_i, sem="relaxed")
    if out.largest is not None:
        most = gl.max(_by_lane(upper.largest, lower.largest), 1)
        bits = out.largest.to(gl.pointer_type(gl.int32), bitcast=True)
        gl.atomic_max(bits + at, most, mask=row < n_i, sem="relaxed")
    if out.distance is not None:
        sums_to_1 = gl.convert_layout(gl.join(upper_lse2, lower_lse2), by_part) < -LOG2_ZERO
        x = gl.where(sums_to_1, x.to(gl.float32), 0.0) * block.side * rest
        distance = gl.sum(_by_lane(upper.distance, lower.distance), 1) + x
        gl.atomic_add(out.distance + at, distance, mask=row < n_i, sem="relaxed")


# Numbers that change with the length, the width or the mask: a kernel is not compiled again for those that are 1 or
# multiples of 16.
LENGTHS_AND_SIZES = [
    *("k_rows_b", "k_rows_g", "k_cols_g", "offset", "low", "heads", "kv_group", "n_i", "n_j", "d", "places"),
    *("attentions", "processors", "first", "to_first", "second", "to_second", "to_rest", "at_once", "rows", "cols"),
]


@gluon.jit(do_not_specialize=LENGTHS_AND_SIZES)
def hopper_summary_kernel(
    Q, K, LSE, LENGTHS, ENTROPY, RECEIVED, LARGEST, DISTANCE, MAP,
    q_b, q_h, q_i, k_rows_b, k_rows_g, k_cols_g, scale, offset, low, heads, kv_group, n_i, n_j, d, places, attentions,
    processors, first, to_first, second, to_second, to_rest, at_once, rows, cols, share,
    D: gl.constexpr,  # the width of tiles: features past d are 0
    SLICES: gl.constexpr,  # ceil(d / 64) if D is above 128: slices of 64 features that a product takes
    STAGES: gl.constexpr,
    PADDED_SUMS: gl.constexpr,
    ROW_BIN: gl.constexpr,
    COL_BIN: gl.constexpr,
    CAUSAL: gl.constexpr,  # no query sees a key after it
    MASKED: gl.constexpr,  # some query does not see all keys, or the last tile is not full
):  # fmt: skip
    """Add the measures to each output that is not None, from q, k and the log-sum-exp of every row.

    It may start while the previous kernel runs (see `hopper_pdl`), if that is the one that clears the outputs.

    The first blocks of 128 rows have `to_first` programs each, the next `second` have `to_second`, the rest `to_rest`.
    `at_once` is 1 if all programs run at the same time, else 0.
    """
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(arrived.index(n), count=1)
    hopper.fence_async_shared()
    index, portion, of = block_of_program(gl.program_id(0), WorkSplit(first, to_first, second, to_second, to_rest))
    if CAUSAL:  # the last rows take longest, and start first; if all start at once, long ones share with short ones
        index = gl.where(at_once > 0, serpentine_order(index, gl.num_programs(0), processors), index)
        from_end, bh = unsigned_divmod(index, attentions)
        place = places - 1 - from_end
    else:
        bh, place = unsigned_divmod(index, places)
    b, h = unsigned_divmod(bh, heads)
    # Registers hold all queries of narrow heads, and of wide ones the upper part: a product reads the lower one from
    # shared memory.
    wide: gl.constexpr = D > 128
    swizzled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], Q.dtype.element_ty)
    copied = gl.allocate_shared_memory(Q.dtype.element_ty, [1 if wide else 2, 64, D], swizzled)
    tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, 64, D], swizzled)
    stored = gl.allocate_shared_memory(gl.float32, [4, 8, 64], PADDED if PADDED_SUMS else SWIZZLED)
    Q += b.to(gl.int64) * q_b + h.to(gl.int64) * q_h
    LSE += bh.to(gl.int64) * n_i
    upper_lse2 = _start_queries(Q, LSE, copied.index(0), place, 0, q_i, n_i, d, D)
    async_copy.commit_group()
    if not wide:
        lower_lse2 = _start_queries(Q, LSE, copied.index(1), place, 1, q_i, n_i, d, D)
        async_copy.commit_group()
    group, _ = unsigned_divmod(h, kv_group)
    keys = KeyTiles(K, b * k_rows_b + group * k_rows_g, group * k_cols_g, tiles, arrived)
    if MAP is not None:
        MAP += bh.to(gl.int64) * rows * cols
    if RECEIVED is not None:
        RECEIVED += bh.to(gl.int64) * n_j
    out = RowOutputs(ENTROPY, LARGEST, DISTANCE)
    cells = MapCells(MAP, rows, cols, share)
    length = n_j
    if LENGTHS is not None:
        length = gl.minimum(n_j, gl.load(LENGTHS + b))
    position = place * 128 + offset
    # Rows past the end see no more keys than the last row: they are 0, and 0 times a key that is NaN would be NaN.
    last = gl.minimum(place * 128 + 128, n_i) - 1 + offset
    order, reach, side = order_tiles(position, last, low, length, portion, of, MASKED, CAUSAL)
    block = RowBlock(place, position, low, reach if MASKED else None, scale * LOG2E, side)
    begin = order.partial.begin
    for step in gl.static_range(STAGES - 1):
        _start_copy(keys, order, begin + step, "careful")
    operand: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    async_copy.wait_group(0 if wide else 1)
    barrier()
    if wide:
        upper_queries = _load_slices(_feature_slices(copied.index(0), SLICES), operand)
        barrier()  # every warp has read the upper part, which the lower one overwrites
        lower_lse2 = _start_queries(Q, LSE, copied.index(0), place, 1, q_i, n_i, d, D)
        async_copy.commit_group()
    else:
        upper_queries = copied.index(0).load(operand)
    _await_copy(keys, order, begin)
    product = _start_product((upper_queries,), 0, keys, begin)
    async_copy.wait_group(0)
    if wide:
        hopper.fence_async_shared()
        barrier()
        queries = (upper_queries, _feature_slices(copied.index(0), SLICES))
    else:
        barrier()
        queries = (upper_queries, copied.index(1).load(operand))
    wait_for_previous_kernel()  # it writes the zeros
    if MASKED and MAP is not None and cells_fit_in_warp(ROW_BIN, COL_BIN):
        clear_cells(place, gl.where(portion == 0, (reach + 63) // 64 * (64 // COL_BIN), cols), cells, ROW_BIN)
    zeros = gl.zeros([64, 64], gl.float32, layout=PRODUCT)
    stored.store(sum_row_pairs(zeros))
    sums = ColumnSums(stored, tile_at_step(order, begin, "careful") * 64)
    zero = first_of_last_dim(keys_by_thread(zeros), 16)
    upper = RowMeasures(zero, zero.to(gl.int32), zero)
    lower = upper
    product, sums, upper, lower = _reduce_run(
        TileRun(begin, order.crossing.end, 0, 1), 1.0, order, product, sums, upper, lower, queries, keys, upper_lse2,
        lower_lse2, block, out, RECEIVED, cells, ROW_BIN, COL_BIN, "careful",
    )  # fmt: skip
    product, sums, upper, lower = _reduce_run(
        order.long, -side, order, product, sums, upper, lower, queries, keys, upper_lse2, lower_lse2,
        block, out, RECEIVED, cells, ROW_BIN, COL_BIN, "long",
    )  # fmt: skip
    if not CAUSAL:
        product, sums, upper, lower = _reduce_run(
            order.short, side, order, product, sums, upper, lower, queries, keys, upper_lse2, lower_lse2,
            block, out, RECEIVED, cells, ROW_BIN, COL_BIN, "short",
        )  # fmt: skip
    hopper.warpgroup_mma_wait(0, deps=[product])
    if order.short.end > 0:
        barrier()
        add_column_sums(sums, place, RECEIVED, cells, ROW_BIN, COL_BIN)
    rest = gl.where(portion == 0, 1.0, 0.0)
    _write_rows(upper, lower, upper_lse2, lower_lse2, block, rest, bh, n_i, out)
