"""Feed-forward: against the formulas written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.nn import FeedForward, GatedFeedForward

D = torch.float64


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "relu": (F.relu, lambda x: x.clamp(min=0)),
    "gelu": (F.gelu, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "tanh gelu": (nn.GELU("tanh"), tanh_gelu),
    "silu": (nn.SiLU(), lambda x: x / (1 + torch.exp(-x))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward_is_two_products_around_the_activation(name, bias):
    activation, formula = ACTIVATIONS[name]
    layer = FeedForward(5, 7, activation=activation, bias=bias).to(D)
    x = torch.randn(2, 3, 5, dtype=D)
    inner = x @ layer.up.weight.T + (layer.up.bias if bias else 0)
    expected = formula(inner) @ layer.down.weight.T + (layer.down.bias if bias else 0)
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    assert len(list(layer.parameters())) == (4 if bias else 2)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_gated_feed_forward_multiplies_two_projections(name, bias):
    activation, formula = ACTIVATIONS[name]
    layer = GatedFeedForward(5, 7, activation=activation, bias=bias).to(D)
    x = torch.randn(2, 3, 5, dtype=D)
    gate, up = (x @ linear.weight.T + (linear.bias if bias else 0) for linear in (layer.gate, layer.up))
    expected = (formula(gate) * up) @ layer.down.weight.T + (layer.down.bias if bias else 0)
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)


def test_the_defaults_are_gelu_and_swiglu():
    x = torch.randn(2, 3, 5)
    for ours, explicit in (
        (FeedForward(5, 7), FeedForward(5, 7, activation=nn.GELU())),
        (GatedFeedForward(5, 7), GatedFeedForward(5, 7, activation=nn.SiLU(), bias=False)),
    ):
        explicit.load_state_dict(ours.state_dict())
        assert torch.equal(ours(x), explicit(x))


@pytest.mark.parametrize("make", [FeedForward, GatedFeedForward])
def test_dropout_acts_inside_and_in_training_only(make):
    layer = make(5, 64, dropout=0.5)
    x = torch.randn(2, 3, 5)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
