"""Sheets: any rectangle of any attention, equal to the same part of the dense matrix."""

import math

import pytest
import torch

from regard import (
    Added,
    Additive,
    Alibi,
    Bilinear,
    Causal,
    Cosine,
    Dense,
    Documents,
    Dot,
    Entmax,
    Hard,
    Location,
    Near,
    Padding,
    Relative,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Tapered,
    Window,
    weights,
)
from regard import Gaussian as Bell
from regard.views.viewer import matrix_view
from regard.views.viewer.matrix_view import Difference, HeadsAggregate, HeadView, map_of_summary, runs

B, H, I, J, D = 2, 4, 37, 51, 8


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


CASES = {
    "plain": {},
    "causal": {"mask": Causal()},
    "causal at the top": {"mask": Causal(), "offset": 0},
    "window": {"mask": Causal() & Window(5)},
    "padding": {"mask": Padding(torch.tensor([30, 51]))},
    "dense": {"mask": Dense(some(B, H, I, J) > 0.5)},
    "documents": {"mask": Documents(torch.arange(I) // 9, torch.arange(J) // 9)},
    "near": {"mask": Near(10 * some(B, H, I), 3)},
    "nothing seen": {"mask": Causal(), "offset": -20},
    "alibi": {"bias": Alibi(H), "mask": Causal()},
    "relative": {"bias": Relative.t5(some(H, 32))},
    "shaw": {"bias": Relative.shaw(some(9, D))},
    "added": {"bias": Added(some(B, H, I, J))},
    "scaled": {"score": Dot(scale=some(H).abs())},
    "capped": {"score": Dot(cap=2.0)},
    "cosine": {"score": Cosine(0.1)},
    "bilinear": {"score": Bilinear(some(H, D, D))},
    "additive": {"score": Additive(some(H, D))},
    "location": {"score": Location(some(H, J, D))},
    "sink": {"normalize": SinkSoftmax(some(H))},
    "sigmoid": {"normalize": Sigmoid(-2.0), "mask": Causal()},
    "sparsemax": {"normalize": Sparsemax()},
    "entmax": {"normalize": Entmax(1.5), "mask": Causal()},
    "hard": {"normalize": Hard()},
    "tapered": {"normalize": Tapered(Softmax(), Bell(10 * some(B, H, I), 4.0))},
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(matrix_view, "CELLS", 8)


@pytest.mark.parametrize("summarized", [False, True])
@pytest.mark.parametrize("terms", CASES.values(), ids=CASES.keys())
def test_a_rectangle_is_that_part_of_the_matrix(terms, summarized):
    q, k = some(B, H, I, D), some(B, 2, J, D).roll(1, 0)
    A = weights(q, k, **terms)
    truth = weights(q.double(), k.double(), **{n: _double(x) for n, x in terms.items()}).dense()
    if summarized:
        A.summary()
    one = HeadView(A, 1, 3)
    for rows, cols in ((slice(0, I), slice(0, J)), (slice(5, 30), slice(7, 50)), (slice(36, 37), slice(0, 1))):
        assert (one.block(rows, cols) - truth[1, 3, rows, cols]).abs().max() < 4e-6
    rows = torch.tensor([3, 36, 0, 11])
    assert (one.block(rows, slice(2, 49)) - truth[1, 3, rows, 2:49]).abs().max() < 4e-6


@pytest.mark.parametrize("size", [1, 8, 64])
@pytest.mark.parametrize("terms", CASES.values(), ids=CASES.keys())
def test_what_is_not_seen_is_zero(terms, size):
    A = weights(some(B, H, I, D), some(B, 2, J, D).roll(1, 0), **terms)
    one = HeadView(A, 1, 3)
    for rows, cols in ((slice(0, I), slice(0, J)), (slice(5, 30), slice(7, 50)), (slice(4, 4), slice(0, J))):
        part = A.dense()[1, 3, rows, cols]
        tiles = one.visible_tiles(rows, cols, size)
        assert tiles.shape == tuple(-(-n // size) for n in part.shape)
        seen = tiles.repeat_interleave(size, 0).repeat_interleave(size, 1)[: part.shape[0], : part.shape[1]]
        assert not part[~seen].any()


def test_tiles_are_seen_where_one_of_several_sees_them():
    q, k = some(1, 2, I, D), some(1, 2, J, D).roll(1, 0)
    whole = slice(0, I), slice(0, J)
    mask = Dense(torch.stack([torch.arange(J) < 9, torch.arange(J) >= 40])[:, None].expand(2, I, J))
    left, right = (HeadView(weights(q, k, mask=mask), 0, head) for head in range(2))
    assert left.visible_tiles(*whole, 8).any(0).tolist() == [True] * 2 + [False] * 5
    assert right.visible_tiles(*whole, 8).any(0).tolist() == [False] * 5 + [True] * 2
    for both in (HeadsAggregate([left, right], "mean"), Difference(left, right)):
        assert both.visible_tiles(*whole, 8).any(0).tolist() == [True] * 2 + [False] * 3 + [True] * 2


def test_runs_are_cut_where_nothing_is_seen():
    assert runs(torch.tensor([False, True, True, False, True]), 3, 22, 4) == [slice(7, 15), slice(19, 22)]
    assert runs(torch.ones(3).bool(), 0, 9, 4) == [slice(0, 9)]
    assert runs(torch.zeros(3).bool(), 0, 9, 4) == runs(torch.zeros(0).bool(), 0, 0, 4) == []


def _double(term):
    return term.map_tensors(lambda x: x.double() if x.is_floating_point() else x) if hasattr(term, "over") else term


def test_hidden_garbage_changes_nothing():
    q, k = some(B, H, I, D), some(B, H, J, D).roll(1, 0)
    mask = Padding(torch.tensor([30, 40]))
    before = HeadView(weights(q, k, mask=mask), 1, 0).block(slice(0, I), slice(0, J))
    k[1, :, 40:] = math.nan
    assert torch.equal(HeadView(weights(q, k, mask=mask), 1, 0).block(slice(0, I), slice(0, J)), before)


def test_chosen_heads_keep_their_numbers():
    from regard.lens.recording.observed import weights_of_observed

    q, k = some(B, H, I, D), some(B, H, J, D).roll(1, 0)
    terms = {"score": Additive(some(H, D)), "mask": Dense(some(B, H, I, J) > 0), "bias": Alibi(H), "normalize": None}
    A = weights_of_observed(q[:, [3, 1]], k[:, [3, 1]], [3, 1], **terms, offset=J - I)
    truth = weights(q, k, score=terms["score"], mask=terms["mask"], bias=terms["bias"]).dense()
    for head, number in enumerate((3, 1)):
        assert (HeadView(A, 0, head).block(slice(0, I), slice(0, J)) - truth[0, number]).abs().max() < 4e-6


def test_half_precision_is_computed_in_single():
    q, k = some(1, 1, I, D).bfloat16(), some(1, 1, J, D).roll(1, 0).bfloat16()
    part = HeadView(weights(q, k), 0, 0).block(slice(0, I), slice(0, J))
    assert part.dtype == torch.float32
    assert (part - weights(q.double(), k.double()).dense()[0, 0]).abs().max() < 4e-6


def test_a_statistic_that_was_not_kept_is_found_for_the_rows_asked_for():
    q, k = some(1, 1, I, D), some(1, 1, J, D).roll(1, 0)
    one = HeadView(weights(q, k), 0, 0)
    ten = slice(0, 10)
    assert one.work(ten, ten) == 100 + 10 * J
    one.block(slice(0, 5), ten)
    assert one.work(ten, ten) == 100 + 5 * J
    A = weights(q, k)
    A.summary()
    assert HeadView(A, 0, 0).work(ten, ten) == 100
    assert HeadView(weights(q, k, normalize=Sigmoid()), 0, 0).work(ten, ten) == 100


def test_heads_together_and_differences():
    A = weights(some(1, H, I, D), some(1, H, J, D).roll(1, 0), mask=Causal())
    truth, rows, cols = A.dense()[0], slice(4, 20), slice(3, 44)
    heads = [HeadView(A, 0, head) for head in range(H)]
    assert torch.allclose(HeadsAggregate(heads, "mean").block(rows, cols), truth.mean(0)[rows, cols])
    assert torch.allclose(HeadsAggregate(heads, "max").block(rows, cols), truth.amax(0)[rows, cols])
    less = Difference(heads[2], HeadsAggregate(heads, "mean"))
    assert torch.allclose(less.block(rows, cols), (truth[2] - truth.mean(0))[rows, cols], atol=1e-7)
    assert less.signed
    assert less.work(rows, cols) == (1 + H) * 16 * 41


def test_stored_maps_of_heads_together():
    A = weights(some(1, 2, I, D), some(1, 2, J, D).roll(1, 0))
    summary = A.summary(peaks=True)
    maps, peaks = summary.map[0], summary.peaks[0]
    heads = [HeadView(A, 0, head, map_of_summary(summary, 0, head)) for head in range(2)]
    assert torch.equal(heads[1].stored_map().peaks, peaks[1])
    assert torch.equal(HeadsAggregate(heads, "max").stored_map().peaks, peaks.amax(0))
    assert HeadsAggregate(heads, "mean").stored_map().peaks is None
    assert Difference(*heads).stored_map().peaks is None
    assert torch.equal(HeadsAggregate(heads, "mean").stored_map().map, maps.mean(0))
    assert HeadsAggregate(heads, "mean").stored_map().exact
    assert not HeadsAggregate(heads, "max").stored_map().exact
    assert torch.equal(Difference(*heads).stored_map().map, maps[0] - maps[1])
    assert HeadsAggregate([heads[0], HeadView(A, 0, 1)], "mean").stored_map() is None
    assert Difference(heads[0], HeadView(A, 0, 1)).stored_map() is None
