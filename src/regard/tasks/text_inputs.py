"""Texts as a classifier reads them: token ids, optionally the characters of each token, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..data import Tokenizer
from . import run_folder
from .character_inputs import ALPHABET_FILE, LETTERS_PER_WORD, CharacterIds
from .encoded_dataset import EncodedExamples, Ids, in_batches
from .vocabulary import TOKENIZER

T = TypeVar("T")
TOKENS_PER_BATCH = 8192  # in inference


@dataclass(frozen=True)
class TextInputs:
    """Encodes texts as token ids, and as characters if there is a second tokenizer for these.

    >>> texts = ["ein Haus", "ein Hund"]
    >>> how = TextInputs(Tokenizer.words(texts), Tokenizer.characters(texts), start=False, limit=100)
    >>> [(rows, batch)] = how.batches(["Haus", "ein Hund"], torch.device("cpu"))
    >>> batch["ids"].shape, batch["characters"].shape
    (torch.Size([2, 2]), torch.Size([2, 32]))

    With `start` a text begins with `bos`, whose state a BERT classifies; with `end` it ends with `eos`, as pretrained
    models expect. A text without tokens is encoded as `eos`. In inference, texts are truncated to `limit` tokens,
    including `eos`.
    """

    words: Tokenizer
    letters: Tokenizer | None
    start: bool
    limit: int
    end: bool = False

    def read(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        """Encode texts as `ids`."""
        rows = self.words.encode_all(texts, bos=self.start, eos=self.end)
        return {"ids": [row or [self.words.eos] for row in rows]}

    def with_ends(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put back the end tokens that truncation removed from a batch."""
        if not self.end:
            return batch
        last = torch.arange(batch["ids"].shape[1]) == self.limit - 1
        full = batch["ids_lengths"] == self.limit
        return {**batch, "ids": batch["ids"].masked_fill(full[:, None] & last, self.words.eos)}

    def spell(self, texts: Sequence[str]) -> dict[str, list[Ids]]:
        """Encode texts as `characters`, `LETTERS_PER_WORD` per token, token after token."""
        assert self.letters is not None
        spelled = CharacterIds(self.letters)
        return {"characters": [spelled(self._token_texts(text)).reshape(-1) for text in texts]}

    def pieces(self, text: str) -> list[str]:
        """Return the part of the text of each token that is read, or the name of a special token."""
        found = self._token_texts(text)
        before = [self.words.bos] if self.start else []
        after = [self.words.eos] if self.end or not (before or found) else []
        return self._truncate(self.words.tokens(before) + found + self.words.tokens(after))

    def batches(self, texts: Sequence[str], device: torch.device) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield the numbers and the batch of every text once, grouped by similar length."""
        ids, spelling = EncodedExamples(texts, self._encode_truncated), self.spelling(texts)
        for rows, batch in in_batches(ids, tokens=TOKENS_PER_BATCH, pad=self.pad, device=device):
            yield rows, spelling(rows, batch)

    def too_long(self, texts: Sequence[str]) -> list[bool]:
        """Return for each text whether it has more tokens than are read."""
        return [bool(n > self.limit) for n in EncodedExamples(texts, self.read).lengths.get("ids", ())]

    def whole(self, texts: Sequence[str], device: torch.device) -> tuple[dict[str, Tensor], list[list[str]]]:
        """Return texts as one batch, in order, and the text of each token, including padding."""
        rows = range(len(texts))
        batch = self.spelling(texts)(
            rows, EncodedExamples(texts, self._encode_truncated).batch(rows, pad=self.pad, device=device)
        )
        n, [fill] = batch["ids"].shape[1], self.words.tokens([self.words.pad])
        pieces = [self.pieces(text) for text in texts]
        return batch, [row + [fill] * (n - len(row)) for row in pieces]

    def spelling(self, texts: Iterable[str]) -> CharacterColumns:
        """Return a function that adds the characters of these texts to batches of their ids."""
        return CharacterColumns(None if self.letters is None else EncodedExamples(texts, self.spell))

    def _token_texts(self, text: str) -> list[str]:
        return [text[span.start : span.end].strip() for span in self.words.spans(text)]

    def _encode_truncated(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"ids": [self._truncate(row) for row in self.read(texts)["ids"]]}

    def _truncate(self, row: list[T]) -> list[T]:
        """Truncate a row to the limit, and keep its end token."""
        if not self.end or len(row) <= self.limit:
            return row[: self.limit]
        return row[: self.limit - 1] + row[-1:]

    @property
    def pad(self) -> dict[str, int]:
        """Padding ids of batches, by field."""
        return {"ids": self.words.pad}

    def files(self) -> dict[str, str]:
        """Return the files of a checkpoint that hold the tokenizers."""
        spelling = {} if self.letters is None else {ALPHABET_FILE: self.letters.to_json()}
        return {TOKENIZER: self.words.to_json(), **spelling}

    @classmethod
    def load(cls, checkpoint: Path, *, start: bool, limit: int, end: bool = False) -> TextInputs:
        """Load the tokenizers of a checkpoint."""
        words = Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))
        spelled = (checkpoint / ALPHABET_FILE).exists()
        letters = Tokenizer.from_json(run_folder.read_text(checkpoint, ALPHABET_FILE)) if spelled else None
        return cls(words, letters, start, limit, end)


@dataclass(frozen=True)
class CharacterColumns:
    """Adds the characters of texts to batches; does nothing if `letters` is None."""

    letters: EncodedExamples | None

    def __call__(self, rows: Sequence[int], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with its `characters`, as many per row as the row has tokens."""
        if self.letters is None:
            return batch
        found = self.letters.batch(rows, pad={}, device=batch["ids"].device)["characters"]
        n = batch["ids"].shape[1] * LETTERS_PER_WORD
        found = torch.nn.functional.pad(found, (0, max(0, n - found.shape[1])))
        return {**batch, "characters": found[:, :n]}
