"""Dense masks back to terms: the term says the same at every entry, and is the plain one where there is one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, Dense, Diagonal, Documents, Padding, Prefix, Window, weights
from regard.lens.terms import infer_mask as module
from regard.lens.terms.infer_mask import Packed, Rows, recognize, recognize_bias
from regard.ops.terms.coordinates import Point

IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2])
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]).bool()
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1]]).bool()


def spelled_out(mask, b, i, j, offset, h=1):
    batch, heads = torch.arange(b).view(-1, 1, 1, 1), torch.arange(h).view(-1, 1, 1)
    return mask.over(Point(batch, heads, torch.arange(i)[:, None], torch.arange(j), offset)).expand(b, h, i, j)


PLAIN = [
    (Causal(), 7, 7, 0),
    (Causal(), 3, 7, 4),
    (Causal() & Window(3), 7, 7, 0),
    (Causal() & Window(2), 3, 7, 4),
    (Window(2), 7, 7, 0),
    (Window(before=1, after=3), 7, 7, 0),
    (Padding((3, 7)), 7, 7, 0),
    (Padding(LEFT), 7, 7, 0),
    (Causal() & Padding((3, 7)), 7, 7, 0),
    (Causal() & Padding(LEFT), 7, 7, 0),
    (Causal() & Padding(HOLES), 7, 7, 0),
    (Causal() & Window(3) & Padding(LEFT), 7, 7, 0),
    (Documents(IDS), 7, 7, 0),
    (Causal() & Documents(IDS), 7, 7, 0),
    (Causal() & Documents(torch.stack((IDS, torch.tensor([0, 1, 1, 1, 2, 2, 2])))), 7, 7, 0),
    (Causal() | Prefix(3), 7, 7, 0),
    (Padding(LEFT), 1, 7, 6),
]


@pytest.mark.parametrize(("mask", "i", "j", "offset"), PLAIN, ids=[f"{n}-{x[0]!r}" for n, x in enumerate(PLAIN)])
def test_structured_masks_come_back_as_their_terms(mask, i, j, offset):
    dense = spelled_out(mask, 2, i, j, offset)
    found, place = recognize(Rows.of(dense))
    assert repr(found) == repr(mask)
    assert place == offset
    assert torch.equal(spelled_out(found, 2, i, j, place), dense)


def test_room_of_a_static_cache_tells_where_queries_stand():
    assert recognize(Rows.of(spelled_out(Causal(), 1, 3, 9, 2))) == (Causal(), 2)
    assert recognize(Rows.of(spelled_out(Causal(), 1, 3, 9, 2)), offset=2) == (Causal(), 2)


def test_a_mask_that_hides_nothing_is_none():
    assert recognize(Rows.of(torch.ones(2, 3, 5, 7, dtype=torch.bool))) == (None, 2)
    assert recognize(Rows.of(torch.ones(2, 3, 0, 7, dtype=torch.bool))) == (None, 7)


def test_a_mask_that_hides_everything_is_padding():
    found, _ = recognize(Rows.of(torch.zeros(1, 1, 3, 4, dtype=torch.bool)))
    assert found == Padding((0,))


def test_heads_that_are_alike_count_once_and_others_are_packed():
    alike = spelled_out(Causal(), 1, 5, 5, 0).repeat(3, 4, 1, 1)
    assert recognize(Rows.of(alike))[0] == Causal()
    alike[1, 2, 0, 4] = True
    found, _ = recognize(Rows.of(alike))
    assert isinstance(found, Packed)
    assert found.bits.shape == (3, 4, 5, 1)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 19), st.integers(0, 2**30), st.floats(0, 1)
)
def test_any_mask_is_recognized_exactly(b, h, i, j, seed, share):
    dense = torch.rand(b, h, i, j, generator=torch.Generator().manual_seed(seed)) < share
    found, place = recognize(Rows.of(dense))
    assert torch.equal(torch.ones_like(dense) if found is None else spelled_out(found, b, i, j, place, h), dense)


@given(st.integers(1, 9), st.integers(0, 6), st.integers(1, 6), st.integers(0, 2**30), st.booleans(), st.booleans())
def test_any_mix_of_terms_is_recognized_exactly(i, more, width, seed, windowed, padded):
    generator = torch.Generator().manual_seed(seed)
    j = i + more
    mask = Causal() & Window(width) if windowed else Causal()
    mask = mask & Padding(torch.rand(2, j, generator=generator) < 0.8) if padded else mask
    dense = spelled_out(mask, 2, i, j, more)
    found, place = recognize(Rows.of(dense))
    assert torch.equal(torch.ones_like(dense) if found is None else spelled_out(found, 2, i, j, place), dense)


def test_long_masks_are_read_in_blocks(monkeypatch):
    monkeypatch.setattr(module, "ENTRIES", 2**6)
    for mask in (Causal(), Causal() & Window(5), Causal() & Padding((40, 63)), ~Diagonal()):
        dense = spelled_out(mask, 2, 63, 63, 0)
        found, place = recognize(Rows.of(dense))
        assert torch.equal(spelled_out(found, 2, 63, 63, place), dense)


def test_packed_bits_are_the_dense_mask_in_an_eighth_of_the_memory():
    keep = torch.rand(2, 3, 5, 21) < 0.5
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 21, 4)
    packed = Packed.of(Rows.of(keep))
    assert packed.bits.shape == (2, 3, 5, 3)
    A, truth = (weights(q, k, mask=mask) for mask in (packed, Dense(keep)))
    assert torch.equal(A.dense(), truth.dense())
    assert torch.equal(A[1, 2, 3:, 5:17], truth[1, 2, 3:, 5:17])
    assert torch.equal(A.select(batch=[1], heads=[2, 0]).received(), truth.select(batch=[1], heads=[2, 0]).received())
    assert str(packed).splitlines()[1] == str(Dense(keep)).splitlines()[1]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Packed(torch.zeros(2, 2), 9), TypeError, "Packed bits must be uint8 with dims b h i bytes"),
        (lambda: Packed([1], 9), TypeError, "Packed bits must be a tensor"),
        (lambda: Packed(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), -1), ValueError, "Packed keys must be 0 or more"),
    ],
)
def test_packed_refuses_what_is_not_bits(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_packed_checks_its_sizes():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match="a bit for each of the keys, got 8 for j=9"):
        weights(q, k, mask=Packed(torch.zeros(1, 1, 5, 1, dtype=torch.uint8), 8))
    with pytest.raises(ValueError, match="Packed bits must broadcast"):
        weights(q, k, mask=Packed(torch.zeros(1, 1, 4, 2, dtype=torch.uint8), 9))


@pytest.mark.parametrize(("i", "j", "offset"), [(7, 7, 0), (3, 7, 4), (7, 3, -4), (5, 9, 0)])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_bias_by_distance_is_a_table(i, j, offset, hidden):
    table = torch.randn(4, 40)
    distance = torch.arange(j) - torch.arange(i)[:, None] - offset
    dense = table[:, distance + 20][None]
    seen = distance <= 0 if hidden else torch.ones(i, j, dtype=torch.bool)
    found = recognize_bias(Rows.of(torch.where(seen, dense, 0.0)), seen=Rows.of(seen[None, None]), offset=offset)
    at = Point(torch.tensor(0), torch.arange(4).view(-1, 1, 1), torch.arange(i)[:, None], torch.arange(j), offset)
    assert found.table.shape[1] <= 2 * (i + j)
    assert torch.equal(found.over(at)[:, seen], dense[0][:, seen])


def test_a_bias_of_another_kind_is_kept_as_it_is():
    for b in (1, 2):
        dense = torch.randn(b, 3, 5, 5)
        assert torch.equal(recognize_bias(Rows.of(dense), offset=0).values, dense)
    keys_only = torch.randn(1, 3, 1, 5)
    assert torch.equal(recognize_bias(Rows.of(keys_only), offset=4).values, keys_only)
    assert recognize_bias(Rows.of(torch.zeros(2, 3, 5, 5)), offset=0) is None
