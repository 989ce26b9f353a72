"""The first tensor that is not finite: a weight, an input, an output, the loss, or a gradient."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regard.train.nonfinite import first_non_finite


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def passes(model, *inputs):
    return [lambda x=x: model(x).sum() for x in inputs]


def test_finite_tensors_are_said_to_be_finite(model):
    assert first_non_finite(model, passes(model, torch.ones(3, 2))) == (
        None,
        "all tensors are finite when recomputed in this process",
    )
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_weight_comes_before_what_is_computed_with_it(model, odd):
    model[2].weight.data[0, 1] = odd
    assert first_non_finite(model, passes(model, torch.ones(3, 2))) == (None, "the weight 2.weight is not finite")


def test_the_pass_and_the_module_are_named(model):
    bad = torch.tensor([[1.0, math.nan]])
    assert first_non_finite(model, passes(model, torch.ones(3, 2), bad)) == (1, "the input of 0 is not finite")
    model[1].register_forward_hook(lambda module, given, result: result / 0)
    found = first_non_finite(model, passes(model, torch.zeros(3, 2)))
    assert found == (0, "1 is the first module whose output is not finite")


def test_tensors_within_containers_and_objects_are_found():
    class Wrap(nn.Module):
        def forward(self, x):
            return {"a": [SimpleNamespace(ids=torch.tensor([1]), x=x)]}

    model = Wrap()
    found = first_non_finite(model, [lambda: model(torch.tensor([math.inf]))])
    assert found == (0, "the input of Wrap is not finite")


def test_a_loss_may_be_the_first(model):
    found = first_non_finite(model, [lambda: model(torch.ones(1, 2)).sum() * math.inf])
    assert found == (0, "every module's output is finite, but the loss is not")


def test_gradients_come_last_and_the_last_module_first(model):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    found = first_non_finite(model, passes(model, torch.ones(3, 2)))
    assert found == (None, "the loss is finite, but the gradient of 2.bias is not")
