"""The weights of sampled points are recorded only if they and their places give the output of the layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.lens import CaptureWarning, capture
from tests.lens.eager.deformable_layers import (
    HEADS,
    MAPS,
    POINTS,
    QUERIES,
    Deformable,
    Pair,
    assert_shows,
    folded,
    joined,
    sampled,
    texts,
    watched,
)


class AtTheEdge(Deformable):
    """Its points are so close to the edge of the maps that float32 and float64 differ on whether they are off it."""

    def forward(self, x, memory):
        edge = torch.tensor([(0.5 / width + 0.5) / 0.4 for _, width in MAPS])[:, None]
        near = torch.linspace(-3e-6, 3e-6, HEADS * POINTS).view(HEADS, 1, POINTS)
        self.offsets.weight.data.zero_()
        self.offsets.bias.data.view(HEADS, len(MAPS), POINTS, 2)[..., 0] = edge + near
        return super().forward(x, memory)


def test_points_at_the_edge_of_a_map_are_proved():
    layer = AtTheEdge()
    assert_shows(watched(layer, *texts(dtype=torch.float32))[0], *layer.kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_are_proved_within_their_rounding(dtype):
    layer = Deformable().to(dtype)
    assert_shows(watched(layer, *texts(dtype=dtype))[0], *layer.kept)


def one_point_a_level(layer, v, places, A):
    A = A[..., :1].flatten(3)
    layer.one = (A / A.sum(-1, keepdim=True)).detach()
    weights = layer.one.transpose(1, 2).flatten(0, 1).unsqueeze(1)
    return joined((torch.cat(sampled(layer, v, places[..., :1, :]), -1) * weights).sum(-1))


def test_levels_may_have_one_point_each():
    layer = Deformable(one_point_a_level).double()
    A = watched(layer, *texts())[0]
    assert torch.equal(A.weights, layer.one.transpose(1, 2))
    assert A.levels == (0, 1)


def one_map(layer, v, places, A):
    """One map, and a weight for each point of a query, as when nothing is stacked."""
    layer.one = (A[..., 0, :] / A[..., 0, :].sum(-1, keepdim=True)).detach()
    (values, _) = sampled(layer, v, places)
    return joined((values * layer.one.transpose(1, 2).flatten(0, 1).unsqueeze(1)).sum(-1))


def test_one_map_needs_no_stack():
    layer = Deformable(one_map).double()
    A = watched(layer, *texts())[0]
    assert torch.equal(A.weights, layer.one.transpose(1, 2))
    assert A.maps == MAPS[:1]


def shared_places(layer, v, places, A):
    """Heads share the places of the first: they are channels of one map for each text."""
    values = []
    for part, size, grid in zip(
        v.permute(0, 2, 3, 1).split(layer.cells, -1), MAPS, places[:, :, 0].unbind(2), strict=True
    ):
        values.append(F.grid_sample(part.flatten(1, 2).unflatten(-1, size), 2 * grid - 1, align_corners=False))
    values = torch.cat(values, -1).unflatten(1, (HEADS, -1))  # b h d i p
    return (values * A.transpose(1, 2).flatten(3).unsqueeze(2)).sum(-1).permute(0, 3, 1, 2).flatten(2)


def test_heads_that_share_places_are_channels_of_the_same_map():
    layer = Deformable(shared_places).double()
    A = watched(layer, *texts())[0]
    places, weights = layer.kept
    assert_shows(A, places[:, :, :1].expand_as(places), weights)


def scaled(layer, v, places, A):
    values = sampled(layer, v, places)
    return joined((torch.cat(values, -1).relu() * folded(A)).sum(-1))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Deformable(scaled), "its output is not the sum of its points times their weights"),
        (lambda: Deformable(align_corners=True), "it samples points with align_corners=True"),
        (lambda: Deformable(padding_mode="border"), "it samples points with padding_mode='border'"),
        (lambda: Deformable(mode="nearest"), "it samples points with mode='nearest'"),
    ],
)
def test_points_that_are_not_proved_are_unseen(layer, message):
    model = Pair(layer()).double()
    with pytest.warns(CaptureWarning, match=f"other was not recorded: {message}"), capture(model) as tape:
        model(*texts())
    assert tape.layers == ["seen"]
    assert [(each.layer, each.kind) for each in tape.unseen] == [("other", "deformable attention")]


def warped(layer, v, places, A):
    """Weights that do not sum to 1: a picture that is moved and hidden in parts."""
    return joined((torch.cat(sampled(layer, v, places), -1) * folded(A).sigmoid()).sum(-1))


def kept_apart(layer, v, places, A):
    """Averages over the queries, not over points."""
    return joined((torch.cat(sampled(layer, v, places), -1) * folded(A)).sum(2)[..., :QUERIES])


def added_up(layer, v, places, A):
    return joined(torch.cat(sampled(layer, v, places), -1).sum(-1))


@pytest.mark.parametrize("way", [warped, kept_apart, added_up], ids=lambda way: way.__name__)
def test_other_sums_of_points_are_no_attention(way):
    model = Pair(Deformable(way)).double()
    assert watched(model, *texts()).layers == ["seen"]
