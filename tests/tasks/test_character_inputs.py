"""Characters of words: a row of ids for each word, as long as every other."""

from __future__ import annotations

import numpy as np
import pytest

from regard.data import Tokenizer
from regard.tasks.character_inputs import LETTERS_PER_WORD, CharacterIds

ALPHABET = Tokenizer.characters(["abc"])


def test_words_are_rows_of_letters_cut_or_padded_to_one_length():
    found = CharacterIds(ALPHABET, letters=3)(["ab", "", "cabba", "ab"])
    assert found.dtype == np.int32
    assert [ALPHABET.decode(row) for row in found.tolist()] == ["ab", "", "cab", "ab"]
    assert found[0, 2] == found[1].any() == 0


def test_a_word_has_sixteen_letters_unless_told_otherwise():
    assert CharacterIds(ALPHABET)(["a" * 99]).shape == (1, LETTERS_PER_WORD) == (1, 16)


def test_no_words_are_no_rows():
    assert CharacterIds(ALPHABET, letters=5)([]).shape == (0, 5)


def test_each_distinct_word_is_encoded_once(monkeypatch):
    encoded = []
    plain = Tokenizer.encode_all
    monkeypatch.setattr(Tokenizer, "encode_all", lambda self, texts: encoded.extend(texts) or plain(self, texts))
    ids = CharacterIds(ALPHABET)
    first = ids(["b", "a", "b"])
    again = ids(["a", "c", "b"])
    assert encoded == ["b", "a", "c"]
    assert np.array_equal(again[[0, 2]], first[[1, 0]])


def test_letters_outside_the_alphabet_are_unknown_and_no_padding():
    [row] = CharacterIds(ALPHABET, letters=3)(["a?b"])
    assert row[1] == ALPHABET.unk
    assert row.all()


def test_an_alphabet_that_pads_with_another_id_is_refused():
    class Late(Tokenizer):
        pad = 7

    alphabet = object.__new__(Late)
    with pytest.raises(ValueError, match="the padding id of the alphabet must be 0, got 7"):
        CharacterIds(alphabet)
