"""Tasks from one text to another: two tokenizers, or one for both sides, and pairs as ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

from ..data import Tokenizer
from . import run_folder
from .encoded_dataset import EncodedExamples
from .vocabulary import TOKENIZER, Vocabulary

SOURCE, TARGET = "tokenizer.source.json", "tokenizer.target.json"  # where the sides share none


class TextPair(Protocol):
    """A text and what is to become of it, as `regard.data.Pair` has them."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...


def check_pairs(pairs: Iterable[TextPair]) -> None:
    """Raise unless each has a source and a target, as a plain tuple has not."""
    for pair in pairs:
        if not (hasattr(pair, "source") and hasattr(pair, "target")):
            raise TypeError(f"a pair must have a source and a target, got {pair!r}; write Pair(source, target)")


class Draft(NamedTuple):
    """A source, what was written from it, and its tokens as they were chosen: of an unknown word, text tells less."""

    source: str
    target: str
    tokens: tuple[int, ...]


class Tokenizers(NamedTuple):
    """The tokenizers of both sides; the same one twice where they share it."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    @property
    def pad(self) -> dict[str, int]:
        """What batches are padded with, by field."""
        return {"source": self.source.pad, "target": self.target.pad}

    def encode(self, pairs: Iterable[TextPair]) -> EncodedExamples:
        """Pairs as `source` and `target`, each with its end."""

        def both(some: Sequence[TextPair]) -> dict[str, list[list[int]]]:
            return {"source": self.encode_sources([pair.source for pair in some]), "target": self.encode_targets(some)}

        return EncodedExamples(pairs, both)

    def sources(self, lines: Sequence[str]) -> EncodedExamples:
        """Sources alone."""
        return EncodedExamples(lines, lambda some: {"source": self.encode_sources(some)})

    def text(self, tokens: Sequence[int], source: str) -> str:
        """What was written from a source."""
        return self.target.decode(tokens)

    def source_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """The tokens of a source."""
        return self.source.labels(ids)

    def target_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """The tokens of what was written from a source."""
        return self.target.labels(ids)

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Sources as ids. The end makes sure that even an empty text has something to attend to."""
        return self.source.encode_all(texts, eos=True)

    def encode_targets(self, pairs: Sequence[TextPair]) -> list[list[int]]:
        """Targets as ids; those of a draft are its own."""
        rows = self.target.encode_all([pair.target for pair in pairs], eos=True)
        return [self._with_end(pair) if isinstance(pair, Draft) else row for pair, row in zip(pairs, rows, strict=True)]

    def _with_end(self, draft: Draft) -> list[int]:
        end = self.target.eos
        return [*draft.tokens, *([] if draft.tokens[-1:] == (end,) else [end])]

    def files(self) -> dict[str, str]:
        """What a checkpoint keeps of them."""
        if self.joint:
            return {TOKENIZER: self.source.to_json()}
        return {SOURCE: self.source.to_json(), TARGET: self.target.to_json()}

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizers:
        """The tokenizers a checkpoint holds."""
        if (checkpoint / TOKENIZER).exists():
            one = Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))
            return cls(one, one)
        return cls(*(Tokenizer.from_json(run_folder.read_text(checkpoint, name)) for name in (SOURCE, TARGET)))


@dataclass(frozen=True, kw_only=True)
class PairVocabulary(Vocabulary):
    """The tokens of both sides."""

    joint: Annotated[bool, "one vocabulary for both sides"] = True

    def learn_both(self, pairs: Iterable[TextPair]) -> Tokenizers:
        """The tokenizers of these pairs, which are iterated more than once."""
        if self.joint or self.load is not None:
            one = self.learn(text for pair in pairs for text in (pair.source, pair.target))
            return Tokenizers(one, one)
        return Tokenizers(self.learn(pair.source for pair in pairs), self.learn(pair.target for pair in pairs))
