"""The figure of sampled points: a dot for each, at its place, as large as its weight."""

import numpy as np
import pytest
import torch

from regard.lens import SampledWeights
from regard.views import points
from regard.views.figures.points_on_maps import DOT


@pytest.fixture
def sampled():
    places = torch.rand(2, 3, 5, 4, 2)
    return SampledWeights(places, torch.rand(2, 3, 5, 4).softmax(-1), [0, 0, 1, 0], [(6, 8), (3, 4)])


def test_dots_are_at_the_places_of_the_points_and_as_large_as_their_weights(sampled):
    figure = points(sampled, query=2, head=1, batch=1, title="layer 3")
    axes = figure.axes[0]
    for dots, own in zip(axes.collections, ([0, 1, 3], [2]), strict=True):
        np.testing.assert_allclose(dots.get_offsets(), sampled.locations[1, 1, 2, own], rtol=1e-6)
        np.testing.assert_allclose(dots.get_sizes(), DOT * sampled.weights[1, 1, 2, own], rtol=1e-6)
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1), (1, 0))
    assert axes.get_aspect() == 6 / 8
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["6 x 8", "3 x 4"]
    colours = {tuple(dots.get_facecolor()[0]) for dots in axes.collections}
    assert len(colours) == 2
    figure.savefig("/dev/null", format="png")


def test_the_picture_lies_under_the_dots(sampled):
    picture = torch.rand(3, 20, 10)
    axes = points(sampled, picture, query=-1).axes[0]
    assert axes.images[0].get_extent() == [0, 1, 1, 0]
    np.testing.assert_allclose(axes.images[0].get_array(), picture.mean(0), rtol=1e-5)
    assert axes.get_aspect() == 2


def test_points_off_the_maps_are_counted(sampled):
    sampled.locations[0, 0, 0, :2] = torch.tensor([[1.5, 0.5], [torch.nan, 0.5]])
    figure = points(sampled, query=0)
    assert [len(dots.get_offsets()) for dots in figure.axes[0].collections] == [1, 1]
    assert figure.legends[0].get_title().get_text() == "2 of 4 points are off the map"
    assert points(sampled, query=1).legends[0].get_title().get_text() == ""


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"query": 5}, IndexError, "query must be from 0 to 4, or negative from the end, got 5"),
        ({"query": 0, "head": -4}, IndexError, "head must be from 0 to 2"),
        ({"query": 0, "batch": 2}, IndexError, "batch must be from 0 to 1"),
    ],
)
def test_queries_that_are_not_there_are_refused(sampled, given, error, message):
    with pytest.raises(error, match=message):
        points(sampled, **given)


def test_points_draw_sampled_weights_alone():
    with pytest.raises(TypeError, match=r"A must be the SampledWeights of a layer, got Tensor; heatmap\(A\) draws"):
        points(torch.eye(3), query=0)
