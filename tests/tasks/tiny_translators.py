"""Translators of numbers that train in a moment, recurrent and Transformers."""

from __future__ import annotations

from regard.data import Pair
from regard.tasks import PairVocabulary, translation
from regard.tasks.translation import TranslationModelSettings
from regard.train import Constant, Recipe, Silence

NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five"}
PAIRS = [
    Pair(f"{a} und {b}", f"{NUMBERS[b]} and {NUMBERS[a]}") for a in NUMBERS for b in NUMBERS if a != b
]  # the other way round, so that alignments are no diagonal
WORDS = PairVocabulary(kind="word", joint=False)
RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2, log_every=1)
TINY = {
    "rnn": TranslationModelSettings(kind="rnn", dim=16, dropout=0.0),
    "transformer": TranslationModelSettings(dim=16, heads=2, depth=2, dropout=0.0),
}


def trained(out, kind="rnn", recipe=RECIPE, **settings):
    settings = {"model": TINY[kind], "vocabulary": WORDS, "show": Silence()} | settings
    return translation.train(PAIRS, out=out, recipe=recipe, **settings)
