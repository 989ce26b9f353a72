"""Training on pairs: what is refused before anything is written, resumed, counted and validated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regard.data import DataError, Pair
from regard.tasks import Batching, PairVocabulary, translation
from regard.tasks.translation import TranslationModelSettings, Translator
from regard.train import Linear, Silence, checkpoint
from tests.tasks.tiny_translators import PAIRS, RECIPE, TINY, WORDS, trained


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(kind, tmp_path):
    whole = trained(tmp_path / "whole", kind)
    torch.manual_seed(99)  # a run depends on its own seed alone
    trained(tmp_path / "parts", kind, replace(RECIPE, steps=2))
    other = replace(TINY[kind], dim=8)  # a run that is resumed keeps the model and the words it has
    parts = trained(tmp_path / "parts", kind, resume=True, model=other, vocabulary=PairVocabulary(kind="char"))
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": Batching(limit=3, long="error")}, "example 0: the example has more than 3 tokens"),
        ({"batching": Batching(limit=3)}, "like 20 of 20 examples; raise the limit"),
        ({"valid": []}, "valid has no pairs"),
        ({"model": TranslationModelSettings(kind="rnn", dim=0)}, "dim must be 1 or more, got 0"),
        ({"vocabulary": PairVocabulary(kind="bpe", size=7)}, "size must leave room for the 256 bytes"),
        (
            {"model": TINY["transformer"], "recipe": replace(RECIPE, forcing=Linear(steps=9))},
            "forcing needs a recurrent decoder, got a Transformer",
        ),
        ({"recipe": replace(RECIPE, patience=2)}, "patience and Plateau need evaluations"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_written(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", **settings)
    assert list(tmp_path.iterdir()) == []


def test_no_pairs_at_all_are_an_error(tmp_path):
    with pytest.raises(DataError, match="there is nothing to learn a vocabulary from"):
        translation.train([], out=tmp_path / "run")


def test_pairs_come_again(tmp_path):
    with pytest.raises(TypeError, match="pairs must be readable more than once, got a generator; pass a list"):
        translation.train((pair for pair in PAIRS), out=tmp_path / "run")


def test_how_many_are_too_long_is_said(tmp_path):
    heard = []

    class Heard(Silence):
        def say(self, line):
            heard.append(line)

    pairs = [*PAIRS, Pair("eins " * 9, "one")]
    settings = {"model": TINY["rnn"], "vocabulary": WORDS, "batching": Batching(limit=8, tokens=64)}
    translation.train(pairs, out=tmp_path / "run", recipe=RECIPE, show=Heard(), **settings)
    assert "1 of 21 examples have more than 8 tokens and were dropped" in heard


def test_validation_is_by_the_same_numbers_as_an_evaluation(tmp_path):
    recipe = replace(RECIPE, metric="chrf", better="higher", evaluate_every=2)
    outcome = trained(tmp_path / "run", valid=PAIRS[:3], recipe=recipe)
    measured = Translator.load(tmp_path / "run").evaluate(PAIRS[:3], beam=1)
    rows = (tmp_path / "run" / "evaluations.csv").read_text().splitlines()
    assert rows[0] == "step,epoch,bleu,chrf,exact,loss"
    best = next(row for row in rows if row.startswith(f"{checkpoint.step_of(outcome.best)},"))
    assert [float(number) for number in best.split(",")[2:]] == pytest.approx([one.value for one in measured.values()])
