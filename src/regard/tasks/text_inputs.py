"""Texts as a classifier reads them: tokens, the letters of each where these count, and the batches of both."""

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
TOKENS_PER_BATCH = 8192  # of a batch that is only read


@dataclass(frozen=True)
class TextInputs:
    """How texts become ids: by tokens, and by their letters where there is a second tokenizer for these.

    >>> texts = ["ein Haus", "ein Hund"]
    >>> how = Texts(Tokenizer.words(texts), Tokenizer.characters(texts), start=False, limit=100)
    >>> [(rows, batch)] = how.batches(["Haus", "ein Hund"], torch.device("cpu"))
    >>> batch["ids"].shape, batch["characters"].shape
    (torch.Size([2, 2]), torch.Size([2, 32]))

    With `start` a text begins with `bos`, which speaks for the whole in a BERT, and with `end` it ends with `eos`, as
    those of others have learned it. A text that says nothing is its end. What is only read is cut after `limit`
    tokens, of which an `end` is one.
    """

    words: Tokenizer
    letters: Tokenizer | None
    start: bool
    limit: int
    end: bool = False

    def read(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        """Texts as `ids`."""
        rows = self.words.encode_all(texts, bos=self.start, eos=self.end)
        return {"ids": [row or [self.words.eos] for row in rows]}

    def ended(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with the ends that cutting texts to the limit took off."""
        if not self.end:
            return batch
        last = torch.arange(batch["ids"].shape[1]) == self.limit - 1
        full = batch["ids_lengths"] == self.limit
        return {**batch, "ids": batch["ids"].masked_fill(full[:, None] & last, self.words.eos)}

    def spell(self, texts: Sequence[str]) -> dict[str, list[Ids]]:
        """Texts as `characters`: so many to a token, one token behind the other."""
        assert self.letters is not None
        spelled = CharacterIds(self.letters)
        return {"characters": [spelled(self._stretches(text)).reshape(-1) for text in texts]}

    def pieces(self, text: str) -> list[str]:
        """The part of the text that each token read stands for; the name of one that stands for none."""
        found = self._stretches(text)
        before = [self.words.bos] if self.start else []
        after = [self.words.eos] if self.end or not (before or found) else []
        return self._kept(self.words.tokens(before) + found + self.words.tokens(after))

    def batches(self, texts: Sequence[str], device: torch.device) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Every text once, those of like length together: their numbers, and the batch on a device."""
        ids, spelling = EncodedExamples(texts, self._cut), self.spelling(texts)
        for rows, batch in in_batches(ids, tokens=TOKENS_PER_BATCH, pad=self.pad, device=device):
            yield rows, spelling(rows, batch)

    def too_long(self, texts: Sequence[str]) -> list[bool]:
        """Of each text, whether its end is not read."""
        return [bool(n > self.limit) for n in EncodedExamples(texts, self.read).lengths.get("ids", ())]

    def whole(self, texts: Sequence[str], device: torch.device) -> tuple[dict[str, Tensor], list[list[str]]]:
        """These as one batch, in order, and what its tokens stand for, padding included."""
        rows = range(len(texts))
        batch = self.spelling(texts)(rows, EncodedExamples(texts, self._cut).batch(rows, pad=self.pad, device=device))
        n, [fill] = batch["ids"].shape[1], self.words.tokens([self.words.pad])
        pieces = [self.pieces(text) for text in texts]
        return batch, [row + [fill] * (n - len(row)) for row in pieces]

    def spelling(self, texts: Iterable[str]) -> CharacterColumns:
        """What adds the letters of these texts to batches of their ids."""
        return CharacterColumns(None if self.letters is None else EncodedExamples(texts, self.spell))

    def _stretches(self, text: str) -> list[str]:
        return [text[span.start : span.end].strip() for span in self.words.spans(text)]

    def _cut(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"ids": [self._kept(row) for row in self.read(texts)["ids"]]}

    def _kept(self, row: list[T]) -> list[T]:
        """What is read of a row: up to the limit, and with its end."""
        if not self.end or len(row) <= self.limit:
            return row[: self.limit]
        return row[: self.limit - 1] + row[-1:]

    @property
    def pad(self) -> dict[str, int]:
        """What batches are padded with."""
        return {"ids": self.words.pad}

    def files(self) -> dict[str, str]:
        """What a checkpoint keeps of them."""
        spelling = {} if self.letters is None else {ALPHABET_FILE: self.letters.to_json()}
        return {TOKENIZER: self.words.to_json(), **spelling}

    @classmethod
    def load(cls, checkpoint: Path, *, start: bool, limit: int, end: bool = False) -> TextInputs:
        """What a checkpoint has kept."""
        words = Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))
        spelled = (checkpoint / ALPHABET_FILE).exists()
        letters = Tokenizer.from_json(run_folder.read_text(checkpoint, ALPHABET_FILE)) if spelled else None
        return cls(words, letters, start, limit, end)


@dataclass(frozen=True)
class CharacterColumns:
    """The letters of texts, nothing where they do not count."""

    letters: EncodedExamples | None

    def __call__(self, rows: Sequence[int], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch of these texts with its `characters`, as many as it has tokens."""
        if self.letters is None:
            return batch
        found = self.letters.batch(rows, pad={}, device=batch["ids"].device)["characters"]
        n = batch["ids"].shape[1] * LETTERS_PER_WORD
        found = torch.nn.functional.pad(found, (0, max(0, n - found.shape[1])))
        return {**batch, "characters": found[:, :n]}
