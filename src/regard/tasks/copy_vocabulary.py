"""Copying: ids beyond the vocabulary for unknown words of a source, so that a model can copy them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .encoded_dataset import EncodedExamples
from .pairs import Draft, TextPair, Tokenizers

Rows = dict[str, list[list[int]]]


class CopyTokenizers(Tokenizers):
    """One vocabulary for both sides, extended for each source by its unknown words in order of appearance.

    >>> from regard.data import Pair, Tokenizer
    >>> words = Tokenizer.words(["the house of Mr and Mrs"])
    >>> copying = CopyTokenizers(words, words)
    >>> row = copying.encode([Pair("Mr Bell of Mrs Bell", "the Bell house")])[0]
    >>> len(words), row["copies"].tolist(), row["target"].tolist()
    (10, [4, 10, 8, 5, 10, 3], [9, 10, 7, 3])
    >>> copying.text([9, 10, 7, 3], "Mr Bell of Mrs Bell")
    'the Bell house'

    Besides `source` there is `copies`, in which each unknown word has its own id, as `models.Pointer` expects (See et
    al. 2017, section 2.2). In `target`, a word is unknown only if it is in neither the vocabulary nor the source.
    """

    __slots__ = ()

    @property
    def pad(self) -> dict[str, int]:
        """Padding ids of batches, by field."""
        return {**super().pad, "copies": self.source.pad}

    def encode(self, pairs: Iterable[TextPair]) -> EncodedExamples:
        """Encode pairs as `source`, `copies` and `target`."""

        def all_three(chunk: Sequence[TextPair]) -> Rows:
            rows, unknown = self._with_copies([pair.source for pair in chunk])
            targets = [
                ids if isinstance(pair, Draft) else self._with_copy_ids(pair.target, ids, known)
                for pair, ids, known in zip(chunk, self.encode_targets(chunk), unknown, strict=True)
            ]
            return {**rows, "target": targets}

        return EncodedExamples(pairs, all_three)

    def sources(self, lines: Sequence[str]) -> EncodedExamples:
        """Encode sources alone, as `source` and `copies`."""
        return EncodedExamples(lines, lambda chunk: self._with_copies(chunk)[0])

    def text(self, tokens: Sequence[int], source: str) -> str:
        """Decode output tokens to text, including words copied from the source."""
        if max(tokens, default=0) < len(self.target):
            return self.target.decode(tokens)
        special = (self.target.pad, self.target.bos, self.target.eos)
        return self.target.join(self.target_labels([token for token in tokens if token not in special], source))

    def source_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """Return the words of a source, given their ids in `copies`."""
        return self.target_labels(ids, source)

    def target_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """Return the words of output tokens, including words copied from the source."""
        unknown, size = list(self._unknown_words(source)), len(self.target)
        names = self.target.tokens(ids)
        return [name if id < size else unknown[id - size] for id, name in zip(ids, names, strict=True)]

    def _with_copies(self, texts: Sequence[str]) -> tuple[Rows, list[dict[str, int]]]:
        """Encode sources as `source` and `copies`, and return the ids of the unknown words of each."""
        sources = self.encode_sources(texts)
        each = list(zip(texts, sources, strict=True))
        unknown = [self._unknown_words(text) if self.source.unk in ids else {} for text, ids in each]
        copies = [self._with_copy_ids(text, ids, known) for (text, ids), known in zip(each, unknown, strict=True)]
        return {"source": sources, "copies": copies}, unknown

    def _unknown_words(self, text: str) -> dict[str, int]:
        pieces = zip(self.source.encode(text), self.source.pieces(text), strict=True)
        unknown = dict.fromkeys(piece for id, piece in pieces if id == self.source.unk)
        return {piece: len(self.source) + number for number, piece in enumerate(unknown)}

    def _with_copy_ids(self, text: str, ids: list[int], unknown: dict[str, int]) -> list[int]:
        """Replace unknown words in the ids of a text by the ids of those that can be copied."""
        if not unknown or self.source.unk not in ids:
            return ids
        pieces = [*self.source.pieces(text), ""]  # the end token has no text
        unk = self.source.unk
        return [unknown.get(piece, id) if id == unk else id for id, piece in zip(ids, pieces, strict=True)]
