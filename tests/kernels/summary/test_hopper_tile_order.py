"""The order of key tiles: each tile with a visible key once, tiles on the diagonal in a phase of their own."""

from __future__ import annotations

import pytest

from regard.kernels.summary import hopper_tile_order
from tests.kernels.plain_python import plain_python

plain = plain_python(hopper_tile_order, unsigned_divmod=lambda x, y: (x // y, x % y))
UNBOUNDED = -(2**30)
KEYS = 64  # of a tile


# The phases of a sequence, and the kinds of `tile_at_step` that know their tiles.
KINDS = {
    "partial": ("careful",),
    "crossing": ("careful",),
    "long": ("careful", "long"),
    "short": ("careful", "long", "short"),
}


def ordered(first, low, length, portion=0, of=1, *, masked, causal):
    """Tiles in the order they are visited, with their phase, the reach of the rows, and the shorter side."""
    order, reach, side = plain.order_tiles(first, first + 127, low, length, portion, of, masked, causal)
    visited, step = [], 0
    for (phase, kinds), run in zip(KINDS.items(), order, strict=True):
        if phase == "short" and causal:  # one side alone
            break
        assert int(run.begin) == step, "phases follow each other without a gap"
        for step in range(int(run.begin), int(run.end)):
            (found,) = {int(plain.tile_at_step(order, step, kind)) for kind in kinds}
            visited.append((phase, found))
        step = int(run.end)
    return visited, int(reach), float(side)


def visible(first, low, length):
    """How many of the 128 rows see each key: j < length and i - j >= low."""
    return [sum(i - j >= low for i in range(first, first + 128)) for j in range(length)]


CAUSAL = [(first, 0, length) for first in (0, 128, 384, -64, -200, 37) for length in (512, 500, 200, 64, 1, 0)]
ALL_SEEN = [(first, UNBOUNDED, length) for first in (0, 128, 384, -64, 37, 2000) for length in (512, 64, 448)]
LENGTHS = [(first, UNBOUNDED, length) for first in (0, 130, -300, 600) for length in (500, 63, 1, 0)]


@pytest.mark.parametrize(("first", "low", "length"), CAUSAL + LENGTHS)
def test_every_tile_with_a_visible_key_is_visited_once_and_no_other(first, low, length):
    visited, reach, _ = ordered(first, low, length, masked=True, causal=low == 0)
    rows = visible(first, low, length)
    assert reach == sum(n > 0 for n in rows)
    tiles = [tile for _, tile in visited]
    assert sorted(tiles) == list(range(-(-reach // KEYS)))
    for name, tile in visited:
        seen = rows[tile * KEYS : (tile + 1) * KEYS]
        assert (name == "partial") is (len(seen) < KEYS or min(seen) < 128)


@pytest.mark.parametrize(("first", "low", "length"), ALL_SEEN)
def test_without_a_mask_all_tiles_are_visited_and_the_diagonal_first(first, low, length):
    visited, reach, side = ordered(first, low, length, masked=False, causal=False)
    assert sorted(tile for _, tile in visited) == list(range(length // KEYS))
    assert reach == length
    on_diagonal = [t for t in range(length // KEYS) if t * KEYS <= first + 127 and (t + 1) * KEYS > first]
    assert [tile for name, tile in visited if name == "crossing"] == on_diagonal
    sides = {name: [tile for n, tile in visited if n == name] for name in ("long", "short")}
    assert len(sides["long"]) >= len(sides["short"])
    left, right = (sides["long"], sides["short"]) if side > 0 else (sides["short"], sides["long"])
    assert left == list(range(len(left) - 1, -1, -1)), "the left side is walked from the diagonal to the first key"
    assert right == list(range(length // KEYS - len(right), length // KEYS))


@pytest.mark.parametrize("of", [2, 3, 8])
@pytest.mark.parametrize(("first", "low", "length"), [(384, 0, 512), (100, 0, 500), (0, 0, 64)])
def test_portions_of_a_block_visit_each_of_its_tiles_once(first, low, length, of):
    whole, _, _ = ordered(first, low, length, masked=True, causal=True)
    parts = [ordered(first, low, length, portion, of, masked=True, causal=True)[0] for portion in range(of)]
    assert sorted(one for part in parts for one in part) == sorted(whole)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("of", [2, 5])
def test_portions_without_a_mask_visit_each_tile_once(of):
    parts = [ordered(200, UNBOUNDED, 640, portion, of, masked=False, causal=False)[0] for portion in range(of)]
    assert sorted(tile for part in parts for _, tile in part) == list(range(10))


def test_blocks_far_apart_begin_at_different_keys():
    begins = [ordered(first, UNBOUNDED, 1024, masked=False, causal=False)[0][0][1] for first in (0, 256, 512, 768)]
    assert begins == [0, 4, 8, 12]
