"""Copying: words that the vocabulary has not, numbered so that they can be copied from the source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .encoded_dataset import EncodedExamples
from .pairs import Draft, TextPair, Tokenizers

Rows = dict[str, list[list[int]]]


class CopyTokenizers(Tokenizers):
    """One vocabulary for both sides, and behind it the words of each source that it has not, in the order they come.

    >>> from regard.data import Pair, Tokenizer
    >>> words = Tokenizer.words(["the house of Mr and Mrs"])
    >>> copying = Copying(words, words)
    >>> row = copying.encode([Pair("Mr Bell of Mrs Bell", "the Bell house")])[0]
    >>> len(words), row["copies"].tolist(), row["target"].tolist()
    (10, [4, 10, 8, 5, 10, 3], [9, 10, 7, 3])
    >>> copying.text([9, 10, 7, 3], "Mr Bell of Mrs Bell")
    'the Bell house'

    Beside `source` there is `copies`, which tells such words apart, as `models.Pointer` reads them (See et al. 2017,
    section 2.2). In `target` a word that neither the vocabulary has nor the source is unknown.
    """

    __slots__ = ()

    @property
    def pad(self) -> dict[str, int]:
        """What batches are padded with, by field."""
        return {**super().pad, "copies": self.source.pad}

    def encode(self, pairs: Iterable[TextPair]) -> EncodedExamples:
        """Pairs as `source`, `copies` and `target`."""

        def all_three(some: Sequence[TextPair]) -> Rows:
            rows, others = self._with_copies([pair.source for pair in some])
            targets = [
                ids if isinstance(pair, Draft) else self._with_copy_ids(pair.target, ids, known)
                for pair, ids, known in zip(some, self.encode_targets(some), others, strict=True)
            ]
            return {**rows, "target": targets}

        return EncodedExamples(pairs, all_three)

    def sources(self, lines: Sequence[str]) -> EncodedExamples:
        """Sources alone, as `source` and `copies`."""
        return EncodedExamples(lines, lambda some: self._with_copies(some)[0])

    def text(self, tokens: Sequence[int], source: str) -> str:
        """What was written from a source, words that were copied out of it included."""
        if max(tokens, default=0) < len(self.target):
            return self.target.decode(tokens)
        silent = (self.target.pad, self.target.bos, self.target.eos)
        return self.target.join(self.target_labels([token for token in tokens if token not in silent], source))

    def source_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """The words of a source, numbered as `copies` are."""
        return self.target_labels(ids, source)

    def target_labels(self, ids: Sequence[int], source: str) -> list[str]:
        """The words of what was written from a source, those that were copied out of it included."""
        others, behind = list(self._unknown_words(source)), len(self.target)
        names = self.target.tokens(ids)
        return [name if id < behind else others[id - behind] for id, name in zip(ids, names, strict=True)]

    def _with_copies(self, texts: Sequence[str]) -> tuple[Rows, list[dict[str, int]]]:
        """Sources, what there is to copy in them, and the numbers of the words in each that the vocabulary has not."""
        sources = self.encode_sources(texts)
        each = list(zip(texts, sources, strict=True))
        others = [self._unknown_words(text) if self.source.unk in ids else {} for text, ids in each]
        copies = [self._with_copy_ids(text, ids, known) for (text, ids), known in zip(each, others, strict=True)]
        return {"source": sources, "copies": copies}, others

    def _unknown_words(self, text: str) -> dict[str, int]:
        pieces = zip(self.source.encode(text), self.source.pieces(text), strict=True)
        unknown = dict.fromkeys(piece for id, piece in pieces if id == self.source.unk)
        return {piece: len(self.source) + number for number, piece in enumerate(unknown)}

    def _with_copy_ids(self, text: str, ids: list[int], others: dict[str, int]) -> list[int]:
        """The ids of a text, with the numbers of words that are unknown but can be copied."""
        if not others or self.source.unk not in ids:
            return ids
        pieces = [*self.source.pieces(text), ""]  # the end has no text
        unk = self.source.unk
        return [others.get(piece, id) if id == unk else id for id, piece in zip(ids, pieces, strict=True)]
