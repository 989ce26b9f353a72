"""Vocabulary: how text is cut into tokens, learned from the training text or loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from ..data import Tokenizer
from ..train.dataclass_json import check_left_at_default, check_types

TOKENIZER = "tokenizer.json"  # what it is called in a folder
Kind = Literal["bpe", "wordpiece", "word", "char"]
Split = Literal["punctuation", "space"]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What tokens are: byte pairs, word pieces, words or characters, and how many.

    >>> Vocabulary(kind="char", size=50).learn(["ein Haus", "ein Hund"])
    Tokenizer(WordLevel, 13 tokens)
    """

    kind: Annotated[Kind, "what a token is", "--tokenizer"] = "bpe"
    size: Annotated[int, "the most tokens a vocabulary may have", "--vocabulary"] = 8000
    split: Annotated[Split, "where words end: 'space' for text that comes tokenized"] = "punctuation"
    load: Annotated[str | None, "a tokenizer.json to use instead of learning one", "--tokenizer-file"] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.load is not None:
            names = ("kind", "size", "split", "joint")
            check_left_at_default(self, *names, whose="a vocabulary that is learned", got=f"load={self.load!r}")
        elif self.kind != "word":
            check_left_at_default(self, "split", whose="words", got=f"kind={self.kind!r}")

    def learn(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer of these texts, which are read once or twice."""
        if self.load is not None:
            return Tokenizer.load(self.load)
        match self.kind:
            case "bpe":
                return Tokenizer.bpe(texts, size=self.size)
            case "wordpiece":
                return Tokenizer.wordpiece(texts, size=self.size)
            case "word":
                return Tokenizer.words(texts, size=self.size, split=self.split)
            case "char":
                return Tokenizer.characters(texts, size=self.size)


@dataclass(frozen=True, kw_only=True)
class WordVocabulary(Vocabulary):
    """Words unless told otherwise: for models that read how words are spelled, or copy those they do not know."""

    kind: Annotated[Kind, "what a token is", "--tokenizer"] = "word"
    size: Annotated[int, "the most tokens a vocabulary may have", "--vocabulary"] = 30_000
