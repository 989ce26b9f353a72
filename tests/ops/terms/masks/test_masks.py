"""Masks against predicates in plain Python: at points, over blocks, as whole tiles, and drawn."""

import itertools

import pytest
import torch

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
    (Blocks(LAYOUT[:2], (3, 2)), lambda b, h, r, i, j: LAYOUT[r // 3, j // 2].item()),
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
