"""Masks against predicates in plain Python: at points, over blocks, as whole tiles, and drawn."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regard import (
    Blocks,
    Causal,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Global,
    Near,
    Padding,
    Prefix,
    Rule,
    Window,
    weights,
)
from regard.ops.blocks.prepared_call import prepare
from regard.ops.call import Call
from regard.ops.terms.coordinates import Block
from regard.ops.terms.mask_tiles import Grid

B, H, I, J = SIZES = 2, 3, 5, 7
BITS = torch.Generator().manual_seed(0)
Q, K = torch.randn(B, H, I, 4, generator=BITS), torch.randn(B, H, J, 4, generator=BITS)


def bits(*shape):
    return torch.randint(2, shape, generator=BITS, dtype=torch.bool)


LENGTHS, STARTS, KEEP = torch.tensor([4, 6]), torch.tensor([1, 3]), bits(B, J)
TOKENS, EACH = torch.tensor([1, 4]), torch.tensor([[0, 5], [2, 3]])
CENTER, CENTERS = torch.tensor([0.0, 1.5, 2.25, 6.0, -3.0]), torch.rand(B, H, I, generator=BITS) * 8 - 1
ROWS, KEYS, IDS = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 2, 2, 3]), torch.tensor([[0] * 5, [1] * 5])
LAYOUT, LAYOUTS = bits(3, 4), bits(B, H, 2, 3)
PAIRS, FULL = bits(I, J), bits(B, H, I, J)

# Each predicate is over batch row, head, query row r, query position i and key position j.
TABLE = [
    (Causal(), lambda b, h, r, i, j: j <= i),
    (Window(1), lambda b, h, r, i, j: abs(i - j) < 1),
    (Window(3), lambda b, h, r, i, j: abs(i - j) < 3),
    (Window(before=2, after=1), lambda b, h, r, i, j: i - 2 <= j <= i + 1),
    (Window(before=0, after=3), lambda b, h, r, i, j: i <= j <= i + 3),
    (Dilated(2, 3), lambda b, h, r, i, j: abs(i - j) < 6 and (i - j) % 3 == 0),
    (Dilated(3, 1), lambda b, h, r, i, j: abs(i - j) < 3),
    (Diagonal(), lambda b, h, r, i, j: i == j),
    (Prefix(0), lambda b, h, r, i, j: False),
    (Prefix(3), lambda b, h, r, i, j: j < 3),
    (Prefix(STARTS), lambda b, h, r, i, j: j < (1, 3)[b]),
    (Global(0), lambda b, h, r, i, j: False),
    (Global(2), lambda b, h, r, i, j: i in (0, 1) or j in (0, 1)),
    (Global((1, 4)), lambda b, h, r, i, j: i in (1, 4) or j in (1, 4)),
    (Global(()), lambda b, h, r, i, j: False),
    (Global(TOKENS), lambda b, h, r, i, j: i in (1, 4) or j in (1, 4)),
    (Global(EACH), lambda b, h, r, i, j: bool({i, j} & ({0, 5}, {2, 3})[b])),
    (Near(CENTER, 1.5), lambda b, h, r, i, j: abs(j - CENTER[r].item()) <= 1.5),
    (Near(CENTERS, 2), lambda b, h, r, i, j: abs(j - CENTERS[b, h, r].item()) <= 2),
    (Near(CENTERS[:, :1, :1], 0.75), lambda b, h, r, i, j: abs(j - CENTERS[b, 0, 0].item()) <= 0.75),
    (Near(torch.arange(5), 1), lambda b, h, r, i, j: abs(j - r) <= 1),
    (Padding((4, 6)), lambda b, h, r, i, j: j < (4, 6)[b]),
    (Padding((4,)), lambda b, h, r, i, j: j < 4),
    (Padding(LENGTHS), lambda b, h, r, i, j: j < (4, 6)[b]),
    (Padding(KEEP), lambda b, h, r, i, j: KEEP[b, j].item()),
    (Documents(ROWS, KEYS), lambda b, h, r, i, j: ROWS[r].item() == KEYS[j].item()),
    (Documents(IDS, KEYS), lambda b, h, r, i, j: IDS[b, r].item() == KEYS[j].item()),
    (Blocks(LAYOUT, 2), lambda b, h, r, i, j: LAYOUT[r // 2, j // 2].item()),
    (Blocks(LAYOUTS, 3), lambda b, h, r, i, j: LAYOUTS[b, h, r // 3, j // 3].item()),
    (Blocks(LAYOUTS[:1, :, :, :1], 3), lambda b, h, r, i, j: LAYOUTS[0, h, r // 3, 0].item()),
    (Dense(PAIRS), lambda b, h, r, i, j: PAIRS[r, j].item()),
    (Dense(FULL), lambda b, h, r, i, j: FULL[b, h, r, j].item()),
    (Dense(FULL[:, :1, :1]), lambda b, h, r, i, j: FULL[b, 0, 0, j].item()),
    (Rule(lambda b, h, i, j: (i + j + h) % 2 == b), lambda b, h, r, i, j: (i + j + h) % 2 == b),
    (Causal() & Window(2), lambda b, h, r, i, j: j <= i and abs(i - j) < 2),
    (Causal() | Prefix(STARTS), lambda b, h, r, i, j: j <= i or j < (1, 3)[b]),
    (~Diagonal(), lambda b, h, r, i, j: i != j),
    (~(Causal() & Dense(PAIRS)) | Padding((1,)), lambda b, h, r, i, j: not (j <= i and PAIRS[r, j].item()) or j < 1),
]
OFFSETS = (0, 2, -3)


def cases(offsets):
    return [
        pytest.param(mask, rule, offset, id=f"{n}-{mask!r}{offset:+d}")
        for n, (mask, rule) in enumerate(TABLE)
        for offset in offsets
    ]


def plain(rule, offset):
    seen = [rule(b, h, r, r + offset, j) for b, h, r, j in itertools.product(*map(range, SIZES))]
    return torch.tensor(seen, dtype=torch.bool).view(SIZES)


def points():
    return torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")


def axes():
    return [index.view([-1] + [1] * (3 - n)) for n, index in enumerate(map(torch.arange, SIZES))]


def problem(mask, offset, **chosen):
    call = Call.of(Q, K, mask=mask, offset=offset)
    return prepare(call.select(**chosen) if chosen else call)


@pytest.mark.parametrize(("mask", "rule", "offset"), cases((0,)))
def test_mask_called_at_points_is_its_predicate(mask, rule, offset):
    expected = plain(rule, offset)
    assert torch.equal(mask(*points()), expected)
    assert torch.equal(mask(*axes()).expand(SIZES), expected)
    assert mask(*points()).dtype == torch.bool


@pytest.mark.parametrize(("mask", "rule", "offset"), cases(OFFSETS))
def test_bound_mask_is_its_predicate_at_every_offset(mask, rule, offset):
    expected = plain(rule, offset)
    assert torch.equal(mask.bind(Q, K, offset)(*points()), expected)
    assert torch.equal(mask.bind(Q, K, torch.tensor(offset))(*axes()).expand(SIZES), expected)


@pytest.mark.parametrize(("mask", "rule", "offset"), cases(OFFSETS))
def test_mask_over_a_block_is_its_predicate(mask, rule, offset):
    expected = plain(rule, offset)
    whole = problem(mask, offset)
    assert torch.equal(mask.over(whole.whole).expand(SIZES), expected)
    cut = slice(1, 2), slice(1, 3), slice(2, 5)
    for cols in (slice(1, 6), slice(6, 7), torch.tensor([0, 3, 6])):
        part = expected[cut][..., cols]
        assert torch.equal(mask.over(whole.block(*cut, cols)).expand(part.shape), part)


@pytest.mark.parametrize(("mask", "rule", "offset"), cases(OFFSETS))
def test_mask_over_chosen_rows_and_heads_keeps_their_numbers(mask, rule, offset):
    batch, heads, rows = torch.tensor([1]), torch.tensor([2, 0]), torch.tensor([4, 1, 2])
    expected = plain(rule, offset)[batch][:, heads][:, :, rows]
    chosen = problem(mask, offset, batch=batch, heads=heads, rows=rows)
    assert torch.equal(mask.over(chosen.whole).expand(expected.shape), expected)
    part = expected[:, 1:, 1:, 2:5]
    block = chosen.block(slice(0, 1), slice(1, 2), slice(1, 3), slice(2, 5))
    assert torch.equal(mask.over(block).expand(part.shape), part)


@pytest.mark.parametrize(("mask", "rule", "offset"), cases(OFFSETS))
def test_weights_are_zero_exactly_where_the_predicate_hides(mask, rule, offset):
    assert torch.equal(weights(Q, K, mask=mask, offset=offset).dense() > 0, plain(rule, offset))


@pytest.mark.parametrize(("mask", "rule", "offset"), cases(OFFSETS))
def test_weights_are_zero_exactly_where_the_predicate_hides_in_many_tiles(mask, rule, offset, monkeypatch):
    monkeypatch.setattr("regard.ops.blocks.prepared_call.ROWS_PER_BLOCK", 2)
    monkeypatch.setattr("regard.ops.blocks.prepared_call.KEYS_PER_TILE", 5)
    assert torch.equal(weights(Q, K, mask=mask, offset=offset).dense() > 0, plain(rule, offset))


def test_offset_is_bottom_right_unless_given():
    assert torch.equal(weights(Q, K, mask=Causal()).dense() > 0, plain(lambda b, h, r, i, j: j <= i, J - I))
    assert torch.equal(weights(K, Q, mask=Causal()).dense()[0, 0] > 0, torch.ones(J, I).tril(I - J) > 0)


@pytest.mark.parametrize("tokens", [Global(3), Global((0, 1, 2)), Global(range(3)), Global(torch.arange(3))], ids=repr)
def test_a_count_of_global_tokens_is_the_positions_from_the_start(tokens):
    assert torch.equal(tokens(*points()), Global([2, 1, 0])(*points()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_sees_one_key_at_radius_zero_whatever_the_dtype_of_its_centre(dtype):
    center = {torch.bfloat16: 300, torch.float16: 4096}[dtype]
    keys = torch.arange(center - 5, center + 6)
    seen = Near(torch.tensor([float(center)], dtype=dtype), 0)(*[torch.tensor(0)] * 3, keys)
    assert keys[seen].tolist() == [center]


def test_a_centre_that_is_nan_hides_its_own_row_only():
    center = torch.arange(300.0)
    center[7] = torch.nan
    q, k = torch.randn(2, 1, 1, 300, 4)
    rows = weights(q, k, mask=Near(center, 1)).dense()[0, 0].sum(-1)
    assert rows[7] == 0
    torch.testing.assert_close(rows[torch.arange(300) != 7], torch.ones(299))


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
    return mask, block_of(sizes, draw(st.integers(-6, 8)), slice(rows, i)), draw(small), draw(small)


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


DRAWN = [
    (Causal() & Window(2), 4, "■···/■■··/·■■·/··■■"),
    (Causal() | Prefix(2), 4, "■■··/■■··/■■■·/■■■■"),
    (~Diagonal(), 3, "·■■/■·■/■■·"),
    (Window(before=0, after=1), 3, "■■·/·■■/··■"),
    (Dilated(2, 2), 4, "■·■·/·■·■/■·■·/·■·■"),
    (Global(1), 3, "■■■/■··/■··"),
    (Global((1,)), 3, "·■·/■■■/·■·"),
    (Global(torch.tensor([[2], [0]])), 3, "··■/··■/■■■"),
    (Rule(lambda b, h, i, j: j > i), 3, "·■■/··■/···"),
    (Padding((2, 4)), 3, "■■·/■■·/■■·"),
    (Prefix(torch.tensor([1, 3])), 3, "■··/■··/■··"),
    (Padding(torch.tensor([[True, False, True]])), None, "■·■/■·■/■·■"),
    (Documents(torch.tensor([0, 0, 1])), None, "■■·/■■·/··■"),
    (Documents(torch.tensor([0, 1]), torch.tensor([1, 1, 0])), None, "··■/■■·"),
    (Blocks(torch.eye(2, dtype=torch.bool), 2), None, "■■··/■■··/··■■/··■■"),
    (Dense(torch.tensor([[True, False, True], [False, True, True]])), None, "■·■/·■■"),
    (Causal() & Documents(torch.tensor([0, 0, 1])), None, "■··/■■·/··■"),
    (~Dense(torch.eye(2, dtype=torch.bool)), None, "·■/■·"),
    (Near(torch.tensor([0.0, 1.5, 2.0]), 0.5), 3, "■··/·■■/··■"),
    (Near(torch.tensor([0.0, 1.5, 2.0]), 0.5), None, "■··/·■■/··■"),
]


@pytest.mark.parametrize(("mask", "n", "picture"), DRAWN, ids=repr)
def test_masks_draw_themselves(mask, n, picture):
    drawing = "\n".join(" ".join(line) for line in picture.split("/"))
    assert mask.draw(n) == drawing
    if n is None:
        assert str(mask) == f"{mask!r}\n{drawing}"


def test_printing_a_mask_of_no_size_draws_twelve_by_twelve(capsys):
    print(Causal() & Window(4))
    source, *lines = capsys.readouterr().out.splitlines()
    assert source == "Causal() & Window(4)"
    assert len(lines) == 12
    assert lines[0] == "■" + " ·" * 11
    assert lines[11] == "· " * 8 + "■ ■ ■ ■"


def test_drawing_takes_rows_and_columns_and_stays_small():
    assert Causal().draw(2, 3) == "■ ■ ·\n■ ■ ■"
    assert len(Dense(torch.ones(100, 70, dtype=torch.bool)).draw().splitlines()) == 24
    assert Padding((2, 4)).draw() == "\n".join(["■ ■ · · · ·"] * 6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Causal() and Window(2),
        lambda: Causal() or Window(2),
        lambda: not Causal(),
        lambda: bool(Dense(PAIRS)),
        lambda: Causal() & Window(2) if Causal() | Prefix(1) else None,
    ],
    ids=["and", "or", "not", "bool", "if"],
)
def test_a_mask_is_neither_true_nor_false(wrong):
    with pytest.raises(TypeError, match=r"neither true nor false; combine masks with & \| ~, not with and, or, not"):
        wrong()
