"""Reader: finds the answer to a question in a document, without a pretrained encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..checks import check_choice, check_int, check_keys, check_probability, check_token_id, check_token_rows
from ..nn import Attention, Core
from ..nn.embeddings import Highway
from ..nn.losses import Loss, cross_entropy
from ..ops.terms.masks import Padding
from ..ops.terms.masks.mask_algebra import Mask
from ..ops.terms.scores import Dot
from .bidirectional import Bidirectional
from .padding import counted_of
from .recurrent_decoder import Cell
from .span_scores import best_spans
from .word_encoder import WordEncoder, characters_per_word


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Sizes and choices of a `Reader`.

    Words have a vector of width `dim` from a table of `vocabulary` words and, with an alphabet of `characters`, one of
    width `character_dim` from their spelling. `hidden` is the width of all later layers, both directions of an RNN
    together; attention splits it over `heads`. `padding` is the id of padding.
    """

    vocabulary: int
    characters: int | None = None
    dim: int = 128
    character_dim: int = 64
    hidden: int = 256
    heads: int = 4
    cell: Cell = "gru"
    padding: int | None = 0
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name in ("vocabulary", "dim", "character_dim", "hidden", "heads"):
            check_int(name, getattr(self, name), least=1)
        if self.characters is not None:
            check_int("characters", self.characters, least=1)
        check_choice("cell", self.cell, Cell)
        check_probability("dropout", self.dropout)
        if self.padding is not None:
            check_token_id("padding", self.padding, self.vocabulary)
        if self.hidden % 2 or self.hidden % self.heads:
            raise ValueError(
                "hidden must be even, half for each direction, and a multiple of heads, "
                f"got hidden={self.hidden} and heads={self.heads}"
            )

    @classmethod
    def small(cls, *, vocabulary: int, characters: int | None = None) -> Self:
        """128 wide throughout: quick on a CPU."""
        return cls(vocabulary=vocabulary, characters=characters, dim=64, character_dim=32, hidden=128)

    @classmethod
    def base(cls, *, vocabulary: int, characters: int | None = None) -> Self:
        """256 wide."""
        return cls(vocabulary=vocabulary, characters=characters)


class Reader(nn.Module):
    """Start and end of the answer to a question in a document.

    >>> model = Reader(ReaderConfig.small(vocabulary=1000)).eval()
    >>> batch = {"document": torch.randint(1, 1000, (2, 12)), "document_lengths": torch.tensor([12, 7])}
    >>> batch |= {"question": torch.randint(1, 1000, (2, 5)), "question_lengths": torch.tensor([3, 5])}
    >>> model.answer(batch, longest=4).shape
    torch.Size([2, 2])

    Bidirectional RNNs read both. Then each word of the question attends to the document, each word of the document to
    the question with its contexts, and to the other words of the document (Seo et al. 2017; Xiong et al. 2017; Wang et
    al. 2017).

    >>> from regard.lens import capture
    >>> with capture(model) as tape:
    ...     start, end = model(batch["document"], batch["question"])
    >>> tape
    Tape(3 layers)
    both.to_document  Weights(2 x 4 x 5 x 12, score=Dot(scale=1.0))
    both.to_question  Weights(2 x 4 x 12 x 5, score=Dot(scale=1.0))
    itself            Weights(2 x 4 x 12 x 12)
    """

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.words = WordEncoder(
            config.vocabulary,
            config.dim,
            characters=config.characters,
            character_dim=config.character_dim,
            padding=config.padding,
        )
        matches = 1 if config.characters is None else 2
        self.narrow = nn.Linear(self.words.width, hidden)
        self.highway = Highway(hidden)
        self.encode = Bidirectional(hidden + matches, hidden, cell=config.cell)
        self.both = BothWays(hidden, heads=config.heads)
        self.digest = Bidirectional(hidden, hidden, cell=config.cell)
        self.itself = Attention(hidden, config.heads)
        self.fuse = nn.Linear(3 * hidden, hidden)
        self.conclude = Bidirectional(hidden, hidden, cell=config.cell)
        self.span = nn.Linear(2 * hidden, 2)
        self.dropout = WholeDropout(config.dropout)

    def forward(
        self,
        document: Int[Tensor, "b n"],
        question: Int[Tensor, "b m"],
        document_characters: Int[Tensor, "b *n c"] | None = None,
        question_characters: Int[Tensor, "b *m c"] | None = None,
        *,
        document_lengths: Int[Tensor, " b"] | None = None,
        question_lengths: Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n"]]:
        """Return the logits of each word as first and as last word of the answer; -inf for padding.

        Characters are those of each word, in a form of `WordEncoder`.
        """
        text = PaddedText.of("document", document, document_characters, document_lengths)
        asked = PaddedText.of("question", question, question_characters, question_lengths)
        words = (self.words(side.ids, side.characters) for side in (text, asked))
        x, y = self._encode(text, asked, *words)
        x = self.both(x, y, mask=text.mask, other_mask=asked.mask)
        x = self.digest(self.dropout(x), text.lengths)
        context = self.itself(x, mask=text.mask)
        x = self.dropout(x + F.relu(self.fuse(torch.cat((x, context, x * context), -1))))
        last = self.dropout(self.conclude(x, text.lengths))
        start, end = self.span(torch.cat((x, last), -1)).unbind(-1)
        if text.keep is None:
            return start, end
        return start.masked_fill(~text.keep, -torch.inf), end.masked_fill(~text.keep, -torch.inf)

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the mean loss of `start` (b,) and `end` (b,), the first and last word of the answer, if not negative.

        It reads `document` and `question`, with `_lengths` if rows are padded and `_characters` if the model uses them.
        If questions may have no answer, begin every document with a special word, which is then the answer.
        """
        check_keys(batch, "document", "question", "start", "end")
        start, end = (
            cross_entropy(x, batch[name], counted=batch[name] >= 0)
            for x, name in zip(self._read(batch), ("start", "end"), strict=True)
        )
        return Loss((start.sum + end.sum) / 2, start.count)

    def answer(self, batch: Mapping[str, Tensor], *, longest: int | None = 17) -> Int[Tensor, "b 2"]:
        """Return the first and last word of the best answer, of at most `longest` words, from a batch."""
        check_keys(batch, "document", "question")
        lengths, document = batch.get("document_lengths"), batch["document"]
        among = None if lengths is None else counted_of(lengths, document, name="document_lengths")
        return best_spans(*self._read(batch), among=among, longest=longest)

    def _read(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        names = ("document_characters", "question_characters", "document_lengths", "question_lengths")
        return self(batch["document"], batch["question"], **{name: batch.get(name) for name in names})

    def _encode(self, text: PaddedText, asked: PaddedText, *words: Float[Tensor, "b _ width"]) -> list[Tensor]:
        """Return the RNN states of both sides, with marks on the words that occur on the other side too."""
        states = []
        for side, x, marks in zip((text, asked), words, _mark_matches(text, asked), strict=True):
            x = self.highway(self.narrow(self.dropout(x)))
            x = torch.cat((x, marks.to(x.dtype)), -1)
            states.append(self.dropout(self.encode(x, side.lengths)))
        return states


class PaddedText(NamedTuple):
    """The words of a document or a question, and which of them are real."""

    ids: Int[Tensor, "b n"]
    characters: Int[Tensor, "b n c"] | None
    lengths: Int[Tensor, " b"] | None  # on the CPU, where recurrent networks need them
    keep: Bool[Tensor, "b n"] | None
    mask: Padding | None

    @classmethod
    def of(cls, name: str, ids: Tensor, characters: Tensor | None, lengths: Tensor | None) -> PaddedText:
        """Check the inputs of one side and build its keep and mask."""
        check_token_rows(name, ids)
        characters = None if characters is None else characters_per_word(characters, ids)
        if lengths is None:
            return cls(ids, characters, None, None, None)
        keep = counted_of(lengths, ids, name=f"{name}_lengths")
        return cls(ids, characters, lengths.cpu(), keep, Padding(lengths))


def _mark_matches(text: PaddedText, asked: PaddedText) -> tuple[Bool[Tensor, "b n marks"], Bool[Tensor, "b m marks"]]:
    """Return for each word whether the other side has the same id and, if characters are used, the same spelling."""
    same = [text.ids[:, :, None] == asked.ids[:, None]]
    x, y = text.characters, asked.characters
    if x is not None and y is not None:
        # Words of the two sides may be padded to different widths; padding does not change a word.
        width = max(x.shape[-1], y.shape[-1])
        x, y = (F.pad(side, (0, width - side.shape[-1])) for side in (x, y))
        same.append((x[:, :, None] == y[:, None]).all(-1))
    pairs = torch.stack(same, -1)  # b n m marks
    of_text = pairs if asked.keep is None else pairs & asked.keep[:, None, :, None]
    of_asked = pairs if text.keep is None else pairs & text.keep[:, :, None, None]
    return of_text.any(2), of_asked.any(1)


class BothWays(nn.Module):
    """Attention of a document to a question and its contexts in the document, after Xiong et al. 2017, section 2.2.

    Each word y_j of the question attends to the document; each word x_i of the document attends to the words of the
    question with their contexts, which gives c_i. The output is relu(W [x; c; x * c]).
    """

    def __init__(self, dim: int, *, heads: int = 1) -> None:
        super().__init__()
        self.to_document = Trilinear(dim, heads=heads)
        self.to_question = Trilinear(dim, heads=heads)
        self.join = nn.Linear(2 * dim, dim)
        self.fuse = nn.Linear(3 * dim, dim)

    def forward(
        self,
        x: Float[Tensor, "b n dim"],
        y: Float[Tensor, "b m dim"],
        *,
        mask: Mask | None = None,
        other_mask: Mask | None = None,
    ) -> Float[Tensor, "b n dim"]:
        """`mask` hides words of the document, `other_mask` of the question."""
        seen = self.to_document(y, x, x, mask=mask)  # b m dim
        context = self.to_question(x, y, self.join(torch.cat((y, seen), -1)), mask=other_mask)  # b n dim
        return F.relu(self.fuse(torch.cat((x, context, x * context), -1)))


class Trilinear(nn.Module):
    """softmax_j(w . [x_i; y_j; x_i * y_j]) @ v, the score of Seo et al. 2017, split over heads.

    The part of x_i alone is the same for every j, so the softmax drops it, and the rest is a dot product:
    (u * x_i + w) . y_j. It is initialized as the scaled dot product.
    """

    def __init__(self, dim: int, *, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.product = nn.Parameter(torch.full((dim,), (dim // heads) ** -0.5))
        self.key = nn.Parameter(torch.zeros(dim))
        self.core = Core()

    def forward(
        self,
        x: Float[Tensor, "b i dim"],
        y: Float[Tensor, "b j dim"],
        values: Float[Tensor, "b j dim"],
        *,
        mask: Mask | None = None,
    ) -> Float[Tensor, "b i dim"]:
        q, k, v = (
            side.unflatten(-1, (self.heads, -1)).transpose(1, 2) for side in (x * self.product + self.key, y, values)
        )
        return self.core(q, k.to(q.dtype), v.to(q.dtype), score=Dot(scale=1.0), mask=mask).transpose(1, 2).flatten(2)


class WholeDropout(nn.Module):
    """Dropout of whole features: a row loses the same features in all its words (Gal & Ghahramani 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b n dim"]:
        return F.dropout1d(x.mT, self.p, self.training).mT
