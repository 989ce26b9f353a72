"""Copying: words outside of the vocabulary have numbers, and come back as they stood in the source."""

from __future__ import annotations

import pytest
import torch

from regard.data import Pair, Tokenizer
from regard.tasks.copy_vocabulary import CopyTokenizers
from regard.tasks.pairs import Draft
from regard.tasks.word_alignment import word_per_draft_token

KNOWN = ["the house of the dog, and a (cat) met"]


def copying(**options):
    words = Tokenizer.words(KNOWN, **options)
    return CopyTokenizers(words, words)


def test_a_word_has_the_number_of_its_first_place():
    sides = copying()
    size, unk = len(sides.source), sides.source.unk
    row = sides.encode([Pair("Bell met the Fox and Bell", "the Fox, Bell")])[0]
    assert row["source"].tolist()[:1] == [unk]
    expected = [size, None, None, size + 1, None, size, None]
    assert row["copies"].tolist() == [
        known if new is None else new for known, new in zip(row["source"].tolist(), expected, strict=True)
    ]
    the, fox, comma, bell, end = row["target"].tolist()
    assert (fox, bell, end) == (size + 1, size, sides.source.eos)
    assert sides.source.tokens([the, comma]) == ["▁the", ","]


def test_what_neither_the_vocabulary_has_nor_the_source_is_unknown():
    sides = copying()
    [target] = (sides.encode([Pair("Bell met the dog", "Crow met Bell")])[0]["target"].tolist(),)
    assert target[0] == sides.source.unk
    assert target[2] == len(sides.source)


def test_a_draft_keeps_the_numbers_of_what_it_copied():
    sides = copying()
    tokens = (len(sides.source) + 1, sides.source.unk, len(sides.source))
    draft = Draft("Bell met the Fox", sides.text(tokens, "Bell met the Fox"), tokens)
    assert draft.target == "Fox <unk> Bell"
    assert sides.encode([draft])[0]["target"].tolist() == [*tokens, sides.source.eos]
    assert word_per_draft_token(sides, draft) == [0, 1, 2]


def test_each_source_counts_anew():
    sides = copying()
    encoded = sides.encode([Pair("Bell met", "Bell"), Pair("Fox met", "Fox"), Pair("the dog", "Fox")])
    size = len(sides.source)
    assert [int(encoded[n]["copies"].max()) for n in range(2)] == [size, size]
    assert encoded[2]["copies"].tolist() == encoded[2]["source"].tolist()
    assert encoded[2]["target"].tolist()[0] == sides.source.unk


@pytest.mark.parametrize("source", ["the Bell, and (Fox) met", "Bell", " Bell\tthe  dog ", "the dog"])
def test_all_that_was_copied_is_the_text_again(source):
    sides = copying()
    copies = sides.sources([source])[0]["copies"].tolist()
    assert sides.text(copies, source) == " ".join(source.split())


def test_a_copied_word_stands_as_the_words_around_it_ask():
    sides = copying()
    source = "the (Bell) met Bell"
    pieces = dict(zip(sides.source.pieces(source), sides.sources([source])[0]["copies"].tolist(), strict=False))
    comma = sides.source.id(",")
    assert sides.text([pieces["▁Bell"], comma, pieces["▁("], pieces["Bell"], pieces[")"]], source) == "Bell, (Bell)"


def test_tokens_without_an_unknown_have_nothing_behind_them():
    pairs = Tokenizer.bpe(KNOWN, size=280)
    sides = CopyTokenizers(pairs, pairs)
    row = sides.encode([Pair("Bell met", "Bell")])[0]
    assert row["copies"].tolist() == row["source"].tolist()
    assert sides.text(row["target"].tolist(), "Bell met") == "Bell"


def test_rows_are_padded_alike():
    sides = copying()
    batch = sides.sources(["the", "the Bell met"]).batch([0, 1], pad=sides.pad, device=torch.device("cpu"))
    assert batch["copies"].shape == batch["source"].shape
    assert batch["copies"][0, 2:].tolist() == batch["source"][0, 2:].tolist() == [sides.source.pad] * 2
