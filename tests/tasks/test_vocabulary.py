"""Vocabularies: every kind, learned or loaded."""

from __future__ import annotations

import pytest

from regard.data import DataError, Pair, Tokenizer
from regard.tasks import PairVocabulary, Vocabulary

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


def test_both_sides_share_a_vocabulary_or_have_their_own():
    pairs = [Pair("ab", "cd")]
    joint = PairVocabulary(kind="char").learn_both(pairs)
    assert joint.source is joint.target
    assert "<unk>" not in joint.source.tokens(joint.source.encode("abcd"))
    apart = PairVocabulary(kind="char", joint=False).learn_both(pairs)
    assert apart.source.tokens(apart.source.encode("abc")) == ["a", "b", "<unk>"]
    assert apart.target.tokens(apart.target.encode("bcd")) == ["<unk>", "c", "d"]


def test_only_source_and_target_of_an_example_are_learned_from():
    class Dated(Pair):
        def __iter__(self):
            return iter((*super().__iter__(), "zz"))

    assert "<unk>" in (learned := PairVocabulary(kind="char").learn_both([Dated("ab", "cd")]).source).tokens(
        learned.encode("z")
    )


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(TypeError, match="kind must be 'bpe' or 'wordpiece' or 'word' or 'char', got 'syllable'"):
        Vocabulary(kind="syllable")
