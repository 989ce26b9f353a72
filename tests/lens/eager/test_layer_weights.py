"""Weights of a layer are told from keys and values, also where the layer changed them."""

import pytest
import torch
from torch import nn

from regard.lens.eager.layer_weights import is_layer_weight

LAYER = nn.Sequential(nn.Linear(12, 20), nn.ModuleList([nn.Linear(20, 12)]))
UP = LAYER[0].weight


@pytest.mark.parametrize(
    "weight",
    [UP, UP.bfloat16(), UP.T, UP[None], 3 * UP, UP + 0.1 * UP.roll(1), UP.sign() * UP.abs().mean()],
    ids=["itself", "cast", "transposed", "with a batch dim", "scaled", "adapted", "quantized"],
)
def test_what_is_made_of_a_parameter_is_a_weight(weight):
    assert is_layer_weight(weight.detach(), [LAYER])


def test_other_tensors_of_the_same_size_are_no_weights():
    torch.manual_seed(0)
    assert not is_layer_weight(torch.randn(20, 12), [LAYER])
    assert not is_layer_weight(torch.randn(2, 20, 12), [LAYER])


def test_parameters_of_the_running_part_and_of_the_one_around_it_count():
    inner = nn.Identity()
    assert is_layer_weight(UP.detach(), [LAYER, inner])
    assert not is_layer_weight(UP.detach(), [LAYER, inner, inner])
