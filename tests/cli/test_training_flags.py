"""The flags of training: the recipe that they make, and those that contradict each other."""

from __future__ import annotations

import json
import re

import pytest

from regard.cli.training_flags import DecoderTraining, Training
from regard.train import Constant, Cosine, Exponential, InverseSigmoid, InverseSquareRoot, Linear, Plateau
from tests.cli.commands import SMALL, well


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (
            ["--schedule", "cosine", "--warmup", 1],
            {"kind": "Cosine", "peak": 1e-3, "steps": 4, "warmup": 1, "lowest": 0.0},
        ),
        (["--schedule", "inverse-sqrt", "--warmup", 9], {"kind": "InverseSquareRoot", "peak": 1e-3, "warmup": 9}),
        (["--forcing", "linear", "--forcing-k", 50], {"kind": "InverseSquareRoot", "peak": 1e-3, "warmup": 1}),
        (["--forcing", "inverse-sigmoid"], {"kind": "InverseSquareRoot", "peak": 1e-3, "warmup": 1}),
    ],
)
def test_schedules_have_names(flags, rate, files, tmp_path):
    data = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", *SMALL]
    well("train", "translation", *data, *flags, "--out", tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["rate"] == rate
    forcing = {
        "linear": {"kind": "Linear", "steps": 50, "lowest": 0.0},
        "inverse-sigmoid": {"kind": "InverseSigmoid", "k": 1000},
    }
    assert recipe["forcing"] == forcing.get(flags[1])


def test_the_best_checkpoint_is_chosen_by_the_metric_named(files, tmp_path):
    data = ["--pairs", files / "a.tsv", "--valid-pairs", files / "a.tsv", "--model", "rnn", *SMALL]
    well("train", "translation", *data, "--metric", "loss", "--schedule", "plateau", "--out", tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert (recipe["metric"], recipe["better"]) == ("loss", "lower")
    assert recipe["rate"]["kind"] == "Plateau"


@pytest.mark.parametrize(
    ("settings", "rate", "forcing"),
    [
        ({}, InverseSquareRoot(1e-3, warmup=400), None),
        ({"schedule": "constant", "warmup": 3}, Constant(1e-3, warmup=3), None),
        ({"schedule": "cosine", "rate": 0.5}, Cosine(0.5, steps=10_000, warmup=400), None),
        ({"schedule": "plateau", "forcing": "linear"}, Plateau(1e-3, warmup=400), Linear(steps=10_000)),
        ({"forcing": "linear", "forcing_k": 7.0}, InverseSquareRoot(1e-3, warmup=400), Linear(steps=7)),
        ({"forcing": "exponential"}, InverseSquareRoot(1e-3, warmup=400), Exponential(0.9999)),
        ({"forcing": "inverse-sigmoid", "forcing_k": 9.0}, InverseSquareRoot(1e-3, warmup=400), InverseSigmoid(9.0)),
    ],
)
def test_a_recipe_has_the_schedules_that_the_flags_name(settings, rate, forcing):
    recipe = DecoderTraining(**settings).recipe("loss")
    assert (recipe.rate, recipe.forcing) == (rate, forcing)


def test_a_recipe_trains_for_10_000_steps_unless_steps_or_epochs_are_given():
    for settings, steps, epochs in (({}, 10_000, None), ({"steps": 3}, 3, None), ({"epochs": 2}, None, 2)):
        recipe = DecoderTraining(**settings).recipe("loss")
        assert (recipe.steps, recipe.epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("metric", "chosen", "better"),
    [
        (None, "bleu", "higher"),
        ("loss", "loss", "lower"),
        ("perplexity", "perplexity", "lower"),
        ("f1", "f1", "higher"),
    ],
)
def test_the_first_metric_selects_checkpoints_unless_one_is_named(metric, chosen, better):
    recipe = Training(metric=metric).recipe("bleu", "loss", "perplexity", "f1")
    assert (recipe.metric, recipe.better) == (chosen, better)


def test_as_many_checkpoints_are_kept_as_will_be_averaged():
    assert Training(keep=2, average=5).recipe("loss").keep == 5
    assert Training(keep=7, average=5).recipe("loss").keep == 7
    assert Training(keep=2).recipe("loss").keep == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0; leave it out for 10,000 steps"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"average": 1}, "average must be at least 2 checkpoints, got 1; leave it out for none"),
        ({"forcing_k": 0.9}, "forcing_k needs forcing, got none; choose linear, exponential or inverse-sigmoid"),
        ({"schedule": "cosine", "epochs": 3}, "schedule cosine needs the number of steps, got epochs; pass steps"),
        ({"metric": "blue"}, "metric must be one of bleu, loss, got 'blue'; did you mean 'bleu'?"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        DecoderTraining(**settings).recipe("bleu", "loss")
