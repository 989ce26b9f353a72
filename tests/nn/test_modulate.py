"""Modulate against its equations."""

import pytest
import torch
from torch import nn

from regard.nn.modulate import MODULATIONS, Modulate

DIM, CONTEXT = 5, 3


def tensors(*lead):
    return torch.randn(*lead, DIM, dtype=torch.float64), torch.randn(*lead, CONTEXT, dtype=torch.float64)


def modulate(how):
    return Modulate(DIM, CONTEXT, how=how).double()


def test_concatenate_is_luongs_equation_5():
    layer = modulate("concatenate")
    h, c = tensors(2, 7)
    W_c, W_h = layer.how.mix.weight.split((CONTEXT, DIM), 1)
    torch.testing.assert_close(layer(h, c), torch.tanh(c @ W_c.T + h @ W_h.T))


def test_gate_moves_from_the_output_to_the_context():
    layer = modulate("gate")
    h, c = tensors(2, 7)
    W_c, W_h = layer.how.gate.weight.split((CONTEXT, DIM), 1)
    z = 1 / (1 + torch.exp(-(c @ W_c.T + h @ W_h.T + layer.how.gate.bias)))
    torch.testing.assert_close(layer(h, c), (1 - z) * h + z * (c @ layer.how.value.weight.T))
    nn.init.constant_(layer.how.gate.bias, -50.0)
    torch.testing.assert_close(layer(h, c), h)


def test_dot_scales_each_feature():
    layer = modulate("dot")
    h, c = tensors(2, 7)
    torch.testing.assert_close(layer(h, c), h * (c @ layer.how.scale.weight.T))


@pytest.mark.parametrize("how", MODULATIONS)
def test_one_step_and_all_steps_give_the_same_numbers(how):
    layer = modulate(how)
    h, c = tensors(2, 7)
    together = layer(h, c)
    for t in range(7):
        torch.testing.assert_close(layer(h[:, t], c[:, t]), together[:, t], rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", MODULATIONS)
def test_gradients_reach_both_sides_and_every_parameter(how):
    layer = modulate(how)
    h, c = (x.requires_grad_() for x in tensors(2))
    layer(h, c).square().sum().backward()
    assert all(x.grad.abs().max() > 0 for x in (h, c, *layer.parameters()))


@pytest.mark.parametrize("how", MODULATIONS)
def test_state_dict_makes_the_round_trip(how):
    layer, other = modulate(how), modulate(how)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(*(x := tensors(2))), layer(*x))


def test_a_module_of_your_own_serves():
    class Sum(nn.Module):
        def forward(self, h, context):
            return h + context

    h = torch.randn(2, DIM)
    assert torch.equal(Modulate(DIM, how=Sum())(h, h), 2 * h)


def test_the_context_width_is_that_of_the_output_unless_given():
    h = torch.randn(2, DIM)
    assert Modulate(DIM, how="gate")(h, h).shape == h.shape


def test_a_way_without_a_name_we_know_raises():
    with pytest.raises(ValueError, match=r"how must be one of concatenate, gate, dot.*'add'"):
        Modulate(DIM, how="add")
