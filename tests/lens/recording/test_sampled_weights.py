"""SampledWeights: measures over points, and shares of cells against PyTorch's bilinear interpolation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.lens import SampledWeights
from regard.lens.recording.sampled_weights import corner_cells

B, H, N, D = 2, 3, 5, 4
MAPS, LEVELS = [(4, 6), (2, 3), (1, 1)], [0, 0, 1, 1, 1, 2, 0]
CELLS = 24 + 6 + 1


@pytest.fixture
def sampled():
    """Points on three maps, some of them off the map, in an order in which levels come again."""
    torch.manual_seed(0)
    places = torch.rand(B, H, N, len(LEVELS), 2, dtype=torch.float64) * 1.6 - 0.3
    places[0, 0, 0] = torch.tensor([[0.0, 0.0], [1, 1], [0.5, 0.5], [1, 0], [-5, 2], [0.5, 0.5], [1 / 12, 1 / 8]])
    weights = torch.randn(B, H, N, len(LEVELS), dtype=torch.float64).softmax(-1)
    return SampledWeights(places, weights, LEVELS, MAPS)


def interpolated(A, features):
    """The weighted sums of features, b h cells d, that grid_sample reads: b h i d."""
    out = 0
    for level, (part, size) in enumerate(zip(features.split([24, 6, 1], 2), MAPS, strict=True)):
        own = [n for n, each in enumerate(LEVELS) if each == level]
        maps = part.mT.reshape(B * H, D, *size)
        grid = 2 * A.locations[:, :, :, own].flatten(0, 1) - 1
        read = F.grid_sample(maps, grid, align_corners=False)
        out = out + (read * A.weights[..., own].flatten(0, 1)[:, None]).sum(-1)
    return out.mT.unflatten(0, (B, H))


def test_rows_over_cells_average_features_as_grid_sample_does(sampled):
    features = torch.randn(B, H, CELLS, D, dtype=torch.float64)
    assert sampled.shape == (B, H, N, CELLS)
    assert torch.allclose(sampled.dense() @ features, interpolated(sampled, features), atol=1e-12)
    for query in range(N):
        assert torch.equal(sampled.row(query - N), sampled.dense()[:, :, query])
        assert torch.equal(sampled[1, 2, query], sampled.dense()[1, 2, query])


def test_what_cells_receive_is_the_sum_of_the_rows(sampled, monkeypatch):
    expected = sampled.dense().sum(2)
    assert torch.allclose(sampled.received(), expected)
    monkeypatch.setattr("regard.lens.recording.sampled_weights.CHUNK_CORNERS", 1)
    assert torch.allclose(sampled.received(), expected)
    maps = sampled.received_maps()
    assert [x.shape for x in maps] == [(B, H, *size) for size in MAPS]
    assert torch.equal(torch.cat([x.flatten(2) for x in maps], -1), sampled.received())


def test_points_off_the_map_are_lost_and_the_middle_of_a_cell_is_its_own():
    places = torch.tensor([[1 / 12, 1 / 8], [0.0, 1 / 8], [0.0, 0.0], [3.0, 0.5], [1e30, -1e30], [torch.nan, 0.5]])
    cells, shares = corner_cells(places, [0] * 6, [(4, 6)])
    assert shares.sum(-1).tolist() == pytest.approx([1, 0.5, 0.25, 0, 0, 0])
    assert cells[0, 0] == 0
    assert cells.min() >= 0
    assert cells.max() < 24


def test_entropy_max_and_topk_are_over_the_points_of_a_query(sampled):
    w = sampled.weights
    assert torch.allclose(sampled.entropy(), -(w * w.log()).sum(-1))
    assert torch.equal(sampled.max(), w.sort(-1).values[..., -1])
    values, indices = sampled.topk(3)
    assert torch.equal(values, w.sort(-1, descending=True).values[..., :3])
    assert torch.equal(w.gather(-1, indices), values)


def test_measures_have_the_dims_of_other_entries(sampled):
    found = sampled.measures()
    assert torch.equal(found.received(), sampled.received())
    assert found.entropy().shape == found.max().shape == (B, H, N)


def test_heads_are_selected_and_tensors_mapped(sampled):
    A = sampled.select_heads([2, 0])
    assert torch.equal(A.weights, sampled.weights[:, [2, 0]])
    assert torch.equal(A.received(), sampled.received()[:, [2, 0]])
    names = []
    doubled = A.map_tensors(lambda x, name: (names.append(name), x * 2)[1])
    assert torch.equal(doubled.weights, A.weights * 2)
    assert names == ["locations of points", "weights of points"]


def test_the_text_names_points_and_maps(sampled):
    assert repr(sampled) == "SampledWeights(2 x 3 x 5 x 31, 7 points on 3 maps of 4 x 6, 2 x 3, 1 x 1)"


def test_it_cannot_be_changed(sampled):
    with pytest.raises(AttributeError):
        sampled.weights = torch.zeros(1)


def test_a_dense_matrix_of_points_has_a_limit(sampled):
    with pytest.raises(ValueError, match=r"takes .* GB, more than limit='500B'; ask for a row, A.row\(query\)"):
        sampled.dense(limit="500B")


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda A: A[0], TypeError, r"write A\[batch, head, query\]"),
        (lambda A: A.row(N), IndexError, "query must be from 0 to 4, or negative from the end, got 5"),
        (lambda A: A.topk(0), ValueError, "k must be from 1 to 7, the number of points of a query, got 0"),
        (lambda A: A.topk(8), ValueError, "k must be from 1 to 7"),
    ],
)
def test_other_queries_and_counts_are_refused(sampled, use, error, message):
    with pytest.raises(error, match=message):
        use(sampled)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": torch.ones(1, 1, 2)}, "weights must hold floats of dims b h i p"),
        ({"weights": torch.ones(1, 1, 2, 3, dtype=torch.long)}, "weights must hold floats of dims b h i p"),
        ({"locations": torch.ones(1, 1, 2, 3)}, r"locations must hold floats of shape \(1, 1, 2, 3, 2\)"),
        ({"levels": [0, 1]}, "levels must name one of 2 maps for each of 3 points"),
        ({"levels": [0, 1, 2]}, "levels must name one of 2 maps for each of 3 points"),
        ({"maps": []}, "maps must name the height and width of at least one map"),
        ({"maps": [(2, 2), (0, 3)]}, "maps must name the height and width"),
    ],
)
def test_places_weights_and_maps_must_belong_together(changed, message):
    given = {"locations": torch.rand(1, 1, 2, 3, 2), "weights": torch.ones(1, 1, 2, 3)}
    given |= {"levels": [0, 1, 1], "maps": [(2, 2), (1, 3)], **changed}
    with pytest.raises(ValueError, match=message):
        SampledWeights(**given)
