"""Pairs of texts: tokens of both sides, with one vocabulary or two."""

from __future__ import annotations

import pytest

from regard.data import Pair, Tokenizer
from regard.tasks import PairVocabulary
from regard.tasks.pairs import Draft, Tokenizers, check_pairs
from tests.tasks.tiny_translators import trained


def test_one_tokenizer_is_kept_for_both_sides_or_one_for_each(tmp_path):
    for joint, names in ((True, {"tokenizer.json"}), (False, {"tokenizer.source.json", "tokenizer.target.json"})):
        outcome = trained(tmp_path / str(joint), vocabulary=PairVocabulary(kind="word", joint=joint))
        assert {path.name for path in outcome.best.glob("tokenizer*")} == names
        assert Tokenizers.load(outcome.best).joint is joint


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


def test_a_loaded_vocabulary_is_always_that_of_both_sides():
    message = "joint is only for a vocabulary that is learned, got load='t.json'.*; leave it out"
    with pytest.raises(ValueError, match=message):
        PairVocabulary(load="t.json", joint=False)


SIDES = Tokenizers(Tokenizer.words(["ein Haus"]), Tokenizer.words(["a house"]))


def test_both_sides_end_with_the_end_token_which_a_draft_may_have_already():
    source, target = SIDES
    house, end = target.encode("house"), target.eos
    pairs = [Pair("ein Haus", "house"), Draft("", "house", (*house, end)), Draft("", "house", (*house, target.unk))]
    rows = list(SIDES.encode(pairs))
    assert [row["target"].tolist() for row in rows] == [[*house, end], [*house, end], [*house, target.unk, end]]
    assert [row["source"].tolist() for row in rows[:2]] == [[*source.encode("ein Haus"), source.eos], [source.eos]]
    assert SIDES.sources([""])[0]["source"].tolist() == [source.eos]


def test_an_empty_draft_is_its_end_alone():
    [row] = SIDES.encode([Draft("ein", "", ())])
    assert row["target"].tolist() == [SIDES.target.eos]


def test_labels_and_texts_are_those_of_the_tokenizer_of_their_side():
    source, target = (one.encode(text)[-1] for one, text in zip(SIDES, ("Haus", "house"), strict=True))
    assert SIDES.source_labels([source], "Haus") == ["▁Haus"]
    assert SIDES.target_labels([target], "Haus") == ["▁house"]
    assert SIDES.text([target], "Haus") == "house"


def test_tokenizers_are_shared_only_if_they_are_the_same_one():
    one, same = Tokenizer.words(["ein Haus"]), Tokenizer.words(["ein Haus"])
    assert Tokenizers(one, one).files().keys() == {"tokenizer.json"}
    assert Tokenizers(one, same).files().keys() == {"tokenizer.source.json", "tokenizer.target.json"}


def test_what_has_no_source_and_target_is_refused():
    check_pairs([Pair("a", "b"), Draft("a", "b", ())])
    with pytest.raises(
        TypeError, match=r"a pair must have a source and a target, got 'ab'; use Pair\(source, target\)"
    ):
        check_pairs([Pair("a", "b"), "ab"])
