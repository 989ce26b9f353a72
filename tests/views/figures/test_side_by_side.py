"""Maps of two models beside each other."""

import numpy as np
import pytest
import torch

from regard.views import side_by_side

WORDS = [["a", "dog"], ["the", "old", "cat"]]


def test_each_row_is_an_example_and_each_column_a_model():
    maps = [(torch.eye(2), torch.full((2, 2), 0.5)), (torch.eye(3), torch.rand(3, 3))]
    figure = side_by_side(maps, WORDS, WORDS, names=("first", "second"), title="both")
    places = figure.axes[:4]
    assert [place.get_title() for place in places] == ["first", "second", "", ""]
    for place, drawn in zip(places, [one for pair in maps for one in pair], strict=True):
        np.testing.assert_allclose(place.images[0].get_array(), drawn, atol=1e-7)
        assert place.images[0].norm is places[0].images[0].norm
    assert [label.get_text() for label in places[3].get_yticklabels()] == WORDS[1]
    figure.savefig("/dev/null", format="png")


def test_maps_of_two_shapes_and_none_are_refused():
    with pytest.raises(ValueError, match=r"must have one shape, got \(2, 2\) and \(3, 2\) for number 0"):
        side_by_side([(torch.eye(2), torch.ones(3, 2))], WORDS[:1], WORDS[:1], names=("a", "b"))
    with pytest.raises(ValueError, match="at least one pair of maps, got none"):
        side_by_side([], [], [], names=("a", "b"))
