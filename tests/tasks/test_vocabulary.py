"""Vocabularies: every kind, learned or loaded."""

from __future__ import annotations

import pytest

from regard.data import DataError, Tokenizer
from regard.tasks.vocabulary import Vocabulary, WordVocabulary

TEXTS = ["ein kleines Haus.", "ein kleiner Hund"]


@pytest.mark.parametrize(
    ("vocabulary", "tokens"),
    [
        (Vocabulary(kind="word"), ["▁ein", "▁Haus", "."]),
        (Vocabulary(kind="word", split="space"), ["ein", "<unk>"]),
        (Vocabulary(kind="char"), [*"ein Haus."]),
        (Vocabulary(kind="bpe", size=270), ["ein", "ĠH", "au", "s", "."]),
        (Vocabulary(kind="wordpiece", size=60), ["ein", "Haus", "."]),
    ],
)
def test_each_kind_cuts_text_its_own_way(vocabulary, tokens):
    learned = vocabulary.learn(TEXTS)
    text = "ein Haus." if vocabulary.split == "punctuation" else "ein Haus"
    assert learned.tokens(learned.encode(text)) == tokens
    assert len(learned) <= vocabulary.size


def test_a_loaded_tokenizer_is_taken_as_it_is(tmp_path):
    Tokenizer.characters(["xyz"]).save(tmp_path / "own.json")
    assert Vocabulary(load=str(tmp_path / "own.json")).learn(TEXTS) == Tokenizer.characters(["xyz"])
    with pytest.raises(DataError, match=r"nothing.json: no such file"):
        Vocabulary(load=str(tmp_path / "nothing.json")).learn(TEXTS)


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(TypeError, match="kind must be 'bpe' or 'wordpiece' or 'word' or 'char', got 'syllable'"):
        Vocabulary(kind="syllable")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Vocabulary, {"split": "space"}, "split is only for words, got kind='bpe'"),
        (WordVocabulary, {"kind": "char", "split": "space"}, "split is only for words, got kind='char'"),
        (Vocabulary, {"load": "t.json", "size": 5}, "size is only for a vocabulary that is learned, got load='t.json'"),
        (
            WordVocabulary,
            {"load": "t.json", "kind": "bpe"},
            "kind is only for a vocabulary that is learned, got load='t.json'",
        ),
    ],
)
def test_settings_that_mean_nothing_for_a_kind_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=f"{message}.*; leave it out"):
        kind(**settings)
