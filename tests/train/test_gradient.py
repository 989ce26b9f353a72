"""The gradient of an update against autograd of the mean written out."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from regard.nn import Loss
from regard.train import Group
from regard.train.gradient import Objective, forward_and_backward, mean_gradient

CPU = torch.device("cpu")
PLAIN = torch.autocast("cpu", enabled=False)


class Line(nn.Linear):
    """Squared errors, summed and counted."""

    def __init__(self):
        super().__init__(3, 5, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(2))

    def loss(self, batch):
        errors = (self(batch) - 1).square()
        return Loss(errors.sum(), torch.tensor(errors.numel()))


def found(model, weighed, clip):
    trained = Objective(model)
    once = partial(forward_and_backward, trained, PLAIN, CPU, {})
    return mean_gradient(trained, weighed, once, Group(), clip=clip)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Line()


@pytest.fixture
def batches():
    return [10 * torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 4)]


@pytest.mark.parametrize("clip", [None, 1e-3, 0.7, 1e6])
def test_gradient_is_that_of_the_mean_over_the_batches_that_count_clipped(model, batches, clip):
    step = found(model, [(batches[0], 1.0), (batches[1], 1.0), (batches[2], 0.0)], clip)
    mean = (model(torch.cat(batches[:2])) - 1).square().mean()
    exact = torch.cat([x.flatten() for x in torch.autograd.grad(mean, (model.weight, model.bias))])
    assert (step.loss, step.count) == (pytest.approx(mean.item(), rel=1e-14), 40.0)
    assert step.norm == pytest.approx(exact.norm().item(), rel=1e-14)
    if clip is not None and exact.norm() > clip:
        exact *= clip / (exact.norm() + 1e-6)
    assert torch.allclose(exact, gradient(model), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("clip", "changes"), [(None, 0), (1e6, 0), (1e-3, 1)])
def test_gradients_are_gone_over_once_and_only_to_change_them(model, batches, clip, changes):
    model.loss = lambda batch: model(batch).square().mean()
    found(model, [(batches[1], 1.0)], clip)
    assert [model.weight.grad._version, model.bias.grad._version] == [changes] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradient_that_is_not_finite_is_left_to_be_looked_at(model, batches, bad, clip):
    model.bias.register_hook(lambda g: g * torch.tensor([1.0, bad, 1.0, 1.0, 1.0]))
    step = found(model, [(batches[1], 1.0)], clip)
    assert math.isfinite(step.loss)
    assert not step.finite
    assert model.bias.grad.isfinite().tolist() == [True, False, True, True, True]
    [of_sum] = torch.autograd.grad(model.loss(batches[1]).sum, model.weight)
    assert torch.equal(model.weight.grad, of_sum)


def test_numbers_of_each_pass_are_kept_where_the_next_writes_over_them(model):
    """As the replays of one graph do."""
    loss, count = torch.zeros(()), torch.zeros(())

    def once(batch, weight):
        model.bias.grad = torch.ones_like(model.bias)
        return loss.add_(batch), count.add_(2.0)

    step = mean_gradient(Objective(model), [(1.0, 1.0), (3.0, 1.0)], once, Group(), clip=None)
    assert (step.sum, step.count) == (1.0 + 4.0, 2.0 + 4.0)
