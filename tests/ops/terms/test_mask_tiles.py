"""Tiles that masks report as empty or full, against the masks written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regard import (
    Blocks,
    Causal,
    Chunked,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Global,
    Near,
    Neighborhood,
    Padding,
    Prefix,
    Rule,
    Window,
)
from regard.ops.terms.coordinates import Block
from regard.ops.terms.mask_tiles import Grid
from tests.cases import grid_of, window_of

BITS = torch.Generator().manual_seed(0)


def bits(*shape):
    return torch.randint(2, shape, generator=BITS, dtype=torch.bool)


LAYOUTS = bits(2, 3, 2, 3)


@st.composite
def masks_on_a_grid(draw):
    b, h, i, j = sizes = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 11), st.integers(1, 11)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def ids(n, *shape):
        return torch.randint(n, shape, generator=random)

    size, fill = draw(st.integers(1, 4)), draw(st.sampled_from([0.1, 0.5, 0.9]))
    cells = -(-i // size), -(-j // size)
    small = st.integers(1, 6)
    leaves = st.one_of(
        st.just(Causal()),
        st.just(Diagonal()),
        st.builds(Window, small),
        st.builds(Window, before=small, after=small),
        st.builds(Window, st.tuples(*[small] * h)),
        st.builds(Window, before=st.just(ids(5, h)), after=small),
        st.builds(Chunked, small),
        st.builds(Dilated, st.integers(1, 3), st.integers(1, 3)),
        st.builds(Prefix, small),
        st.builds(Global, small),
        st.builds(Global, st.lists(small, max_size=2)),
        st.builds(Near, st.just(torch.rand(b, h, i, generator=random) * 14 - 2), st.floats(0, 6)),
        st.sampled_from(
            [
                Prefix(ids(j + 1, b)),
                Global(ids(12, b, 2)),
                Near(ids(j, 1, h, 1).half(), 1),
                Padding(ids(j + 1, b)),
                Padding(tuple(ids(j + 1, b).tolist())),
                Padding(torch.rand(b, j, generator=random) < fill),
                Documents(ids(3, b, i).sort().values, ids(3, j).sort().values),
                Documents(ids(3, i), ids(3, b, j)),
                Blocks(torch.rand(b, 1, *cells, generator=random) < fill, size),
                Blocks(torch.rand(b, 1, cells[0], -(-j // 2), generator=random) < fill, (size, 2)),
                Neighborhood(grid_of(i), window_of(torch.zeros(grid_of(i)))),
                Blocks(torch.rand(h, 1, cells[1], generator=random) < fill, size),
                Dense(torch.rand(b, h, i, j, generator=random) < fill),
                Dense(torch.rand(i, 1, generator=random) < fill),
                Rule(lambda b, h, i, j: (i * j + h) % 3 > b),
            ]
        ),
    )
    mask = draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.builds(lambda x, y: x & y, inner, inner),
                st.builds(lambda x, y: x | y, inner, inner),
                st.builds(lambda x: ~x, inner),
            ),
            max_leaves=5,
        )
    )
    rows = draw(st.integers(0, i - 1))
    offset = draw(st.integers(-6, 8) | st.just(ids(14, b) - 6))
    return mask, block_of(sizes, offset, slice(rows, i)), draw(small), draw(small)


def block_of(sizes, offset=0, rows=None):
    b, h, i, j = sizes
    at = slice(0, b), slice(0, h), rows or slice(0, i), slice(0, j)
    return Block(*at, n_h=h, offset=offset, device=torch.device("cpu"), dtype=torch.float32, q=torch.empty(0))


def tiles_of(mask, block, rows, cols):
    """What the mask says of each tile, and what is true of it: some said, full said, any entry, every entry."""
    shape = block.b.numel(), block.h.numel(), block.row.numel(), block.j.numel()
    seen = mask.over(block).expand(shape)
    cut = [part.split(cols, -1) for part in seen.split(rows, -2)]
    grid = shape[0], shape[1], len(cut), len(cut[0])
    said = mask.tiles(Grid(block, rows, cols))
    true = [torch.stack([torch.stack([f(t) for t in row], -1) for row in cut], -2) for f in (_any, _every)]
    return said.some.expand(grid), said.full.expand(grid), *true


def _any(tile):
    return tile.flatten(-2).any(-1)


def _every(tile):
    return tile.flatten(-2).all(-1)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(masks_on_a_grid())
@example((Causal(), block_of((1, 1, 5, 7), -6), 2, 3))
@example((~Blocks(LAYOUTS, 3), block_of((2, 3, 5, 7)), 2, 4))
def test_tiles_reported_empty_are_empty_and_tiles_reported_full_are_full(case):
    mask, block, rows, cols = case
    some, full, any_seen, all_seen = tiles_of(mask, block, rows, cols)
    assert not (any_seen & ~some).any()
    assert not (full & ~all_seen).any()


EXACT = [
    Causal(),
    ~Causal(),
    Window(5),
    Window(before=6, after=0),
    Causal() & Window(9),
    Prefix(5),
    Padding((4, 9)),
    Padding(torch.arange(12) < torch.tensor([[4], [9]])),
    Documents(torch.arange(12) // 5),
    Blocks(torch.eye(4, dtype=torch.bool), 3),
    Dense(torch.ones(12, 12, dtype=torch.bool).tril(-3)),
    Global(5),
]


@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_structured_masks_find_every_empty_and_full_tile(mask):
    some, full, any_seen, all_seen = tiles_of(mask, block_of((2, 2, 12, 12)), 3, 3)
    assert torch.equal(some, any_seen)
    assert torch.equal(full, all_seen)
    assert 0 < full.sum() <= some.sum() < some.numel()


def test_a_rule_claims_nothing_about_tiles():
    some, full, *_ = tiles_of(Rule(lambda b, h, i, j: i < 0), block_of((1, 1, 6, 6)), 2, 2)
    assert some.all()
    assert not full.any()
