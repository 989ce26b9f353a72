"""Recipes: saved as closed JSON, and checked on the way in."""

import json
import math
from dataclasses import replace

import pytest

from regard.train import Constant, Cosine, Exponential, InverseSigmoid, InverseSquareRoot, Linear, Plateau, Recipe

RECIPES = [
    Recipe(steps=1),
    Recipe(epochs=3, rate=InverseSquareRoot(0.7, warmup=4000), betas=(0.9, 0.999), clip=None),
    Recipe(steps=9, rate=Cosine(1e-4, steps=9), forcing=Linear(steps=4), better="higher", metric="bleu"),
    Recipe(steps=9, epochs=2, rate=Plateau(1e-4), forcing=Exponential(0.9), patience=4, precision="bfloat16"),
    Recipe(steps=9, rate=Constant(1e-4, warmup=3), forcing=InverseSigmoid(40), save_every=10, evaluate_every=20),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe.rate).__name__)
def test_recipe_comes_back_from_json(recipe, tmp_path):
    assert Recipe.from_json(recipe.to_json()) == recipe
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    assert Recipe.load(tmp_path / "recipe.json") == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": {"kind": "Constant", "peak": -1.0}}, "file: peak must be a rate above 0, got -1.0"),
        ({"steps": None}, "file: a recipe needs an end; pass steps or epochs"),
        ({"steps": -1}, "file: steps must be at least 0, got -1"),
        ({"accumulate": 0}, "file: accumulate must be at least 1, got 0"),
        ({"keep": 0}, "file: keep must be at least 1, got 0"),
        ({"seed": -1}, "file: seed must be between 0 and 2**32 - 1, got -1"),
        ({"betas": [0.9, 1.0]}, "file: betas must be at least 0 and below 1, got (0.9, 1.0)"),
        ({"eps": 0}, "file: eps must be above 0, got 0"),
        ({"weight_decay": -0.1}, "file: weight_decay must be at least 0, got -0.1"),
        ({"clip": 0.0}, "file: clip must be above 0 and finite, got 0.0; None leaves gradients as they are"),
    ],
)
def test_values_that_no_recipe_can_have_are_answered(change, message):
    text = json.dumps(json.loads(Recipe(steps=3).to_json()) | change)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Recipe.from_json(text, source="file")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_recipes_are_frozen_values():
    assert replace(RECIPES[0], steps=2) == Recipe(steps=2)
    assert hash(RECIPES[2]) == hash(Recipe.from_json(RECIPES[2].to_json()))


@pytest.mark.parametrize("clip", [math.inf, math.nan, -math.inf])
def test_a_clip_that_no_file_can_hold_is_refused(clip):
    with pytest.raises(ValueError, match=r"clip must be above 0 and finite, got .*; None leaves gradients as they are"):
        Recipe(steps=1, clip=clip)
