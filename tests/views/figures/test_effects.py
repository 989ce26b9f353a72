"""The figure of a sweep: its grid in signed colours, its layers and columns named."""

import pytest
import torch

from regard.lens import Sweep, knockouts
from regard.views import effects

LAYERS = {"model.layers.0.self_attn": 3, "model.layers.1.self_attn": 2}


def test_rows_are_layers_and_columns_heads():
    labels = tuple(knockouts(LAYERS))
    figure = effects(Sweep(1.0, labels, torch.tensor([1.5, 1.0, 0.0, 1.0, 3.0], dtype=torch.float64)), title="loss")
    axes, bar = figure.axes[:2]
    drawn = axes.images[0].get_array()
    assert drawn.tolist() == [[0.5, 0.0, -1.0], [0.0, 2.0, None]]  # the second layer has two heads
    assert axes.images[0].get_clim() == (-2.0, 2.0)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layer", "head")
    assert len({text.get_text() for text in axes.get_yticklabels()}) == 2
    assert "change of the metric" in bar.get_ylabel() + bar.get_xlabel()
    figure.savefig("/dev/null", format="png")


def test_columns_may_be_groups_of_tokens_or_none():
    labels = tuple(knockouts(["0", "1"], keys={"the cat": 0, "sat": 1}))
    figure = effects(Sweep(0.0, labels, torch.arange(4.0)))
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["the cat", "sat"]
    assert figure.axes[0].get_xlabel() == "tokens"
    alone = effects(Sweep(0.0, ("a", "b"), torch.arange(2.0)), word="all heads")
    assert alone.axes[0].get_xlabel() == "all heads"


def test_other_values_are_refused():
    with pytest.raises(TypeError, match="effects draws a sweep, got Tensor"):
        effects(torch.eye(3))
