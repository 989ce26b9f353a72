"""AdamW of a recipe: decay of matrices alone, and moments that go to a file and back by name."""

import pytest
import torch
from torch import nn

from regard.train import Callback, CheckpointError, Constant, Recipe, Shuffled, fit
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


class Line(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(3, 2)

    def loss(self, x):
        return (self(x) - 1).square().mean()


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.RMSprop(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1
    ),
}
SCHEDULERS = {
    "none": None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def trained(folder, steps, optimizer, scheduler, resume=False):
    model, losses = Line(), Losses()
    generator = torch.Generator().manual_seed(1)
    batches = Shuffled([torch.randn(4, 3, generator=generator) for _ in range(3)])
    recipe = Recipe(steps=steps, save_every=3, evaluate_every=2, log_every=9, keep=9)
    fit(
        model,
        batches,
        recipe,
        folder=folder,
        evaluate=lambda model: {"loss": 1.0},
        optimizer=optimizer,
        scheduler=scheduler,
        resume=resume,
        callbacks=[losses],
    )
    return model, losses.rates


class Losses(Callback):
    def __init__(self):
        self.rates = []

    def step(self, report):
        self.rates.append(report.rate)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [*((name, "none") for name in OPTIMIZERS), *(("sgd", name) for name in SCHEDULERS)]
)
def test_any_optimizer_and_scheduler_trains_and_resumes_as_the_unbroken_run(tmp_path, optimizer, scheduler):
    settings = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    whole_run, rates = trained(tmp_path / "a", 7, *settings)
    _, first = trained(tmp_path / "b", 4, *settings)
    resumed, rest = trained(tmp_path / "b", 7, *settings, resume=True)
    assert first + rest == rates
    assert all(torch.equal(x, y) for x, y in zip(whole_run.parameters(), resumed.parameters(), strict=True))


def test_steps_are_those_of_a_plain_loop(tmp_path):
    found, rates = trained(tmp_path, 5, OPTIMIZERS["sgd"], SCHEDULERS["cosine"])
    model = Line()
    optimizer = OPTIMIZERS["sgd"](model)
    scheduler = SCHEDULERS["cosine"](optimizer)
    generator = torch.Generator().manual_seed(1)
    batches = Shuffled([torch.randn(4, 3, generator=generator) for _ in range(3)])
    for rate, batch in zip(rates, [batch for _ in range(2) for batch in batches], strict=False):
        assert optimizer.param_groups[0]["lr"] == rate
        model.loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert torch.allclose(found.weight, model.weight, atol=1e-6)


def test_another_optimizer_or_scheduler_is_refused_when_a_run_is_resumed(tmp_path):
    trained(tmp_path, 3, OPTIMIZERS["sgd"], SCHEDULERS["cosine"])
    with pytest.raises(ValueError, match="was saved with the optimizer SGD of 1 groups, got Adagrad of 1; use"):
        trained(tmp_path, 5, OPTIMIZERS["adagrad"], SCHEDULERS["cosine"], resume=True)
    with pytest.raises(ValueError, match="was saved with a scheduler; use the same"):
        trained(tmp_path, 5, OPTIMIZERS["sgd"], None, resume=True)


def test_what_is_no_optimizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"optimizer must return a torch.optim.Optimizer, got int"):
        trained(tmp_path, 1, lambda model: 3, None)
    with pytest.raises(TypeError, match="LBFGS calls the model several times a step"):
        trained(tmp_path, 1, lambda model: torch.optim.LBFGS(model.parameters()), None)
    with pytest.raises(TypeError, match=r"scheduler must return a torch.optim.lr_scheduler, got int"):
        trained(tmp_path, 1, OPTIMIZERS["sgd"], lambda optimizer: 3)
    recipe = Recipe(steps=1, rate=Constant(0.5))
    with pytest.raises(ValueError, match=r"set by the scheduler or by the recipe, got rate=Constant"):
        fit(Line(), Shuffled([torch.ones(1, 3)]), recipe, folder=tmp_path, scheduler=SCHEDULERS["cosine"])
