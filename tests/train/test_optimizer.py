"""AdamW of a recipe: decay of matrices alone, and moments that go to a file and back by name."""

import pytest
import torch
from torch import nn

from regard.train import CheckpointError, Constant, Recipe
from regard.train.optimizer import adamw, moments, put_moments, scale, set_rate, whole

RECIPE = Recipe(steps=1, rate=Constant(0.1, warmup=4), weight_decay=0.3, betas=(0.8, 0.9), eps=1e-5)


def stepped(steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = adamw(model, RECIPE)
    for _ in range(steps):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_only_matrices_decay_and_the_rest_is_the_recipes():
    model, optimizer = stepped(0)
    matrices, vectors = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    assert len(vectors["params"]) == 3
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all((g["lr"], g["betas"], g["eps"]) == (0.025, (0.8, 0.9), 1e-5) for g in optimizer.param_groups)


def test_frozen_parameters_are_left_out_and_all_frozen_are_refused():
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    assert adamw(model, RECIPE).param_groups[0]["params"] == []
    with pytest.raises(ValueError, match="model must have parameters that require a gradient, got none"):
        adamw(model.requires_grad_(False), RECIPE)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_moments_are_restored_by_name_also_from_a_compiled_model(prefix):
    model, optimizer = stepped()
    values = moments(optimizer, model)
    assert {"optimizer.exp_avg.0.weight", "optimizer.exp_avg_sq.1.bias", "optimizer.step.0.bias"} <= values.keys()
    other, fresh = stepped(0)
    renamed = {key.replace("0.weight", f"{prefix}0.weight"): x for key, x in values.items()}
    put_moments(renamed, fresh, other, source="file")
    again = moments(fresh, other)
    assert again.keys() == values.keys()
    assert all(torch.equal(again[key], x) for key, x in values.items())


@pytest.mark.parametrize(("name", "shape"), [("0.wight", (3, 2)), ("0.weight", (2, 3))])
def test_moments_that_do_not_fit_the_model_are_refused(name, shape):
    model, optimizer = stepped(0)
    key = f"optimizer.exp_avg.{name}"
    with pytest.raises(CheckpointError, match=f"file holds '{key}', which does not fit the model; build the model"):
        put_moments({key: torch.zeros(shape)}, optimizer, model, source="file")


def test_the_rate_is_set_for_every_group():
    _, optimizer = stepped(0)
    set_rate(optimizer, 0.7)
    assert {group["lr"] for group in optimizer.param_groups} == {0.7}


def test_gradients_are_scaled_in_place():
    gradients = [torch.ones(2), torch.full((1, 3), 2.0)]
    scale(gradients, 0.5)
    assert [x.tolist() for x in gradients] == [[0.5, 0.5], [[1.0, 1.0, 1.0]]]
    scale([], 0.5)


def test_a_tensor_that_is_not_sharded_is_whole_as_it_is():
    x = torch.ones(2)
    assert whole(x) is x
