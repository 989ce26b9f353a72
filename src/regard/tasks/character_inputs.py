"""Characters of words as ids, so that a model can read words outside its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data import Tokenizer

ALPHABET_FILE = "characters.json"  # in a checkpoint
LETTERS_PER_WORD = 16  # further letters of a word are ignored
Ids = np.ndarray[Any, np.dtype[np.int32]]


class CharacterIds:
    """Encodes words as rows of `letters` character ids, padded with 0.

    >>> CharacterIds(Tokenizer.characters(["abc"]), letters=4)(["cab", "", "abacus"]).tolist()
    [[6, 4, 5, 0], [0, 0, 0, 0], [4, 5, 4, 6]]

    The alphabet is a tokenizer of characters whose padding id is 0. Each distinct word is encoded once.
    """

    def __init__(self, alphabet: Tokenizer, *, letters: int = LETTERS_PER_WORD) -> None:
        if alphabet.pad:
            raise ValueError(f"the padding id of the alphabet must be 0, got {alphabet.pad}")
        self.alphabet, self.letters = alphabet, letters
        self._numbers: dict[str, int] = {}
        self._rows: list[Ids] = []

    def __call__(self, words: Sequence[str]) -> Ids:
        new = [word for word in dict.fromkeys(words) if word not in self._numbers]
        for word, ids in zip(new, self.alphabet.encode_all(new), strict=True):
            row = np.zeros(self.letters, np.int32)
            row[: len(ids)] = ids[: self.letters]
            self._numbers[word] = len(self._rows)
            self._rows.append(row)
        rows = [self._rows[self._numbers[word]] for word in words]
        return np.stack(rows) if rows else np.zeros((0, self.letters), np.int32)
