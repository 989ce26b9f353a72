"""A module mixes positions if one position of its input changes others of its output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.lens.audit.position_mixing import mixing_modules, position_axes
from tests.lens import unseen_layers as ways
from tests.lens.unseen_layers import DIM, Layer, tokens


class By(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def kinds(model, *inputs, lead=()):
    """The names of the modules that mix, with their kinds."""
    names = {module: name for name, module in model.named_modules()}
    found = mixing_modules(model, lambda: model(*inputs), lead)
    return {names[module]: each.kind for module, each in found.items()}


MIXING = {
    "all": lambda x: x.mean(1, keepdim=True) + x,
    "before": lambda x: x.cumsum(1),
    "neighbours": lambda x: x + x.roll(1, 1),
    "dilated": lambda x: x + x.roll(2, 1),
    "pooled": lambda x: x.mean(1),
    "halved": lambda x: x.unflatten(1, (-1, 2)).mean(2),
    "Fourier": lambda x: torch.fft.fft(x, dim=1).real,
}
ALONE = {
    "rows": lambda x: x.square() * x.sum(-1, keepdim=True),
    "first": lambda x: x[:, 0],
    "turned": lambda x: x.roll(1, 1),
    "reversed": lambda x: x.flip(1),
    "cut": lambda x: x.unflatten(1, (-1, 2)).flatten(0, 1),
    "heads": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2),
    "noise": lambda x: x + torch.randn(x.shape),
    "nothing": lambda x: torch.zeros(3),
}


@pytest.mark.parametrize("function", MIXING.values(), ids=MIXING)
def test_functions_that_mix_positions_are_found(function):
    assert kinds(By(function), tokens()) == {"": "mixes positions"}


@pytest.mark.parametrize("function", ALONE.values(), ids=ALONE)
def test_functions_of_each_position_are_not(function):
    assert kinds(By(function), tokens()) == {}


@pytest.mark.parametrize("shape", [(6, DIM), (6, 2, DIM), (2, 3, 6, DIM)])
def test_positions_may_be_an_axis_of_their_own_without_batch_or_behind(shape):
    axis = -2 if len(shape) != 3 else 0
    assert kinds(By(lambda x: x.cumsum(axis)), torch.randn(shape)) == {"": "mixes positions"}


def test_the_innermost_module_is_named_and_its_owners_are_not():
    model = nn.Sequential(nn.Sequential(By(MIXING["all"]), nn.Linear(DIM, DIM)), By(ALONE["rows"]))
    assert kinds(model, tokens()) == {"0.0": "mixes positions"}


def test_a_module_that_mixes_beside_its_parts_is_named_too():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = By(MIXING["all"])

        def forward(self, x):
            y = self.part(x)
            return torch.sigmoid(y @ y.mT).softmax(-1) @ y

    assert kinds(Block(), tokens()) == {"part": "mixes positions", "": "mixes positions"}


def test_attention_over_the_outputs_of_a_convolution_is_found():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

        def forward(self, x):
            y = self.conv(x.mT).mT
            return torch.sigmoid(y @ y.mT) @ y

    assert kinds(Block(), tokens()) == {"conv": "convolution", "": "mixes positions"}


def test_a_convolution_with_a_computed_weight_is_named_and_what_computes_it_is_not():
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(DIM, DIM, 3, padding=1))
    assert kinds(nn.Sequential(conv), tokens().mT) == {"0": "convolution"}


def test_patches_are_positions():
    model = nn.Sequential(nn.Conv2d(3, DIM, 4, 4), nn.Flatten(2), By(lambda x: x.mT))
    assert kinds(model, torch.randn(2, 3, 8, 8)) == {}


def test_keys_that_are_another_input_are_found():
    class Cross(nn.Module):
        def forward(self, x, *, context):
            return torch.sigmoid(x @ context.mT) @ context

    model = Cross()
    found = mixing_modules(model, lambda: model(tokens(), context=tokens(1)[:, :4]))
    assert len(found) == 1


def test_the_batch_is_no_axis_of_positions_if_it_is_known():
    x = torch.randn(2, 6, DIM)
    over_batch = By(lambda x: x + x.mean(0))
    assert kinds(over_batch, x) == {"": "mixes positions"}
    assert kinds(over_batch, x, lead=(2,)) == {}


@pytest.mark.parametrize(
    ("shape", "lead", "axes"),
    [
        ((2, 6, DIM), (), [1, 0]),
        ((2, 6, DIM), (2,), [1]),
        ((2, 6, DIM), (2, 6), [1]),
        ((6, 6, DIM), (6, 6), [1, 0]),
        ((6, 2, DIM), (2, 6), [1, 0]),
        ((2, 6, 4, DIM), (2, 6), [1]),  # four streams or heads
        ((2, 4, 6, DIM), (2, 6), [2]),
        ((12, DIM), (2, 6), [0]),
        ((2, DIM), (2, 6), []),  # pooled
        ((1, DIM), (), []),
    ],
)
def test_the_shape_of_the_input_tells_which_axes_are_positions(shape, lead, axes):
    assert position_axes(torch.zeros(shape), lead) == axes


def test_the_random_state_of_the_run_is_its_own():
    model = nn.Sequential(Layer(ways.sigmoid), nn.Dropout(0.5))
    drawn = []
    for test in (lambda run: run(), lambda run: mixing_modules(model, run)):
        torch.manual_seed(0)
        test(lambda: drawn.append(model(tokens()).detach()))
    assert torch.equal(*drawn)


def test_the_hooks_are_removed_if_the_model_raises():
    model = nn.Sequential(By(lambda x: x.nothing))
    with pytest.raises(AttributeError, match="nothing"):
        kinds(model, tokens())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
