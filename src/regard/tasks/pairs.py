"""Pairs of texts as token ids, with one tokenizer for both sides or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

from ..data import Tokenizer
from . import run_folder
from .encoded_dataset import EncodedExamples
from .vocabulary import TOKENIZER, Vocabulary

SOURCE, TARGET = "tokenizer.source.json", "tokenizer.target.json"  # if the sides share no tokenizer


class TextPair(Protocol):
    """A source text and its target text, such as `regard.data.Pair`."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...


def check_pairs(pairs: Iterable[TextPair]) -> None:
    """Raise unless each item has a source and a target; a plain tuple has neither."""
    for pair in pairs:
        if not (hasattr(pair, "source") and hasattr(pair, "target")):
            raise TypeError(f"a pair must have a source and a target, got {pair!r}; use Pair(source, target)")


class Draft(NamedTuple):
    """A source, the text generated from it, and its tokens, which the text alone does not determine."""

    source: str
    target: str
    tokens: tuple[int, ...]


class Tokenizers(NamedTuple):
    """The tokenizers of both sides; the same one twice if they share it."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    @property
    def pad(self) -> dict[str, int]:
        """Padding ids of batches, by field."""
        return {"source": self.source.pad, "target": self.target.pad}

    def encode(self, pairs: Iterable[TextPair]) -> EncodedExamples:
        """Encode pairs as `source` and `target`, each with its end token."""

        def encode_chunk(chunk: Sequence[TextPair]) -> dict[str, list[list[int]]]:
            return {
                "source": self.encode_sources([pair.source for pair in chunk]),
                "target": self.encode_targets(chunk),
            }

        return EncodedExamples(pairs, encode_chunk)

    def sources(self, lines: Sequence[str]) -> EncodedExamples:
        """Encode sources alone."""
        return EncodedExamples(lines, lambda chunk: {"source": self.encode_sources(chunk)})

    def text(self, tokens: Sequence[int], source: str) -> str:
        """Decode output tokens to text."""
        return self.target.decode(tokens)

    def source_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """Return the text of each token of a source."""
        return self.source.labels(ids)

    def target_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """Return the text of each output token."""
        return self.target.labels(ids)

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode sources as ids; the end token gives even an empty text something to attend to."""
        return self.source.encode_all(texts, eos=True)

    def encode_targets(self, pairs: Sequence[TextPair]) -> list[list[int]]:
        """Encode targets as ids; a draft keeps its own tokens."""
        rows = self.target.encode_all([pair.target for pair in pairs], eos=True)
        return [self._with_end(pair) if isinstance(pair, Draft) else row for pair, row in zip(pairs, rows, strict=True)]

    def _with_end(self, draft: Draft) -> list[int]:
        end = self.target.eos
        return [*draft.tokens, *([] if draft.tokens[-1:] == (end,) else [end])]

    def files(self) -> dict[str, str]:
        """Return the files of a checkpoint that hold the tokenizers."""
        if self.joint:
            return {TOKENIZER: self.source.to_json()}
        return {SOURCE: self.source.to_json(), TARGET: self.target.to_json()}

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizers:
        """Load the tokenizers of a checkpoint."""
        if (checkpoint / TOKENIZER).exists():
            one = Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))
            return cls(one, one)
        return cls(*(Tokenizer.from_json(run_folder.read_text(checkpoint, name)) for name in (SOURCE, TARGET)))


@dataclass(frozen=True, kw_only=True)
class PairVocabulary(Vocabulary):
    """Settings of the vocabulary of both sides."""

    joint: Annotated[bool, "Share one vocabulary between source and target."] = True

    def learn_both(self, pairs: Iterable[TextPair]) -> Tokenizers:
        """Learn both tokenizers from pairs, which are iterated more than once."""
        if self.joint or self.load is not None:
            one = self.learn(text for pair in pairs for text in (pair.source, pair.target))
            return Tokenizers(one, one)
        return Tokenizers(self.learn(pair.source for pair in pairs), self.learn(pair.target for pair in pairs))
