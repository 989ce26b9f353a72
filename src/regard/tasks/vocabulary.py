"""Settings of the vocabulary, which is learned from the training text or loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from ..data import Tokenizer
from ..train.dataclass_json import check_left_at_default, check_types

TOKENIZER = "tokenizer.json"  # in a checkpoint or a Hugging Face folder
Kind = Literal["bpe", "wordpiece", "word", "char"]
Split = Literal["punctuation", "space"]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Settings of a vocabulary: the type of its tokens, and their maximum number.

    >>> Vocabulary(kind="char", size=50).learn(["ein Haus", "ein Hund"])
    Tokenizer(WordLevel, 13 tokens)
    """

    kind: Annotated[Kind, "Type of token: byte pairs, word pieces, words or characters.", "--tokenizer"] = "bpe"
    size: Annotated[int, "Maximum number of tokens in the vocabulary.", "--vocabulary"] = 8000
    split: Annotated[
        Split,
        "End of a word (word only): at punctuation and spaces, or only at spaces, for tokenized text.",
    ] = "punctuation"
    load: Annotated[
        str | None, "A tokenizer.json file to use instead of learning a vocabulary.", "--tokenizer-file"
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.load is not None:
            names = ("kind", "size", "split", "joint")
            check_left_at_default(self, *names, whose="a vocabulary that is learned", got=f"load={self.load!r}")
        elif self.kind != "word":
            check_left_at_default(self, "split", whose="words", got=f"kind={self.kind!r}")

    def learn(self, texts: Iterable[str]) -> Tokenizer:
        """Learn a tokenizer from texts, which are iterated once or twice."""
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
    """Settings with words as default tokens, for models that read characters or copy unknown words."""

    kind: Annotated[Kind, "Type of token: byte pairs, word pieces, words or characters.", "--tokenizer"] = "word"
    size: Annotated[int, "Maximum number of tokens in the vocabulary.", "--vocabulary"] = 30_000
