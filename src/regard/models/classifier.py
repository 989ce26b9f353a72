"""TextClassifier: word vectors, an optional bidirectional RNN, attention pooling, and a class for the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import check_choice, check_flag, check_int, check_keys, check_number, check_probability, check_token_id
from ..nn import AttentionPool
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy_per_target
from .bidirectional import Bidirectional
from .recurrent_decoder import Cell
from .word_encoder import WordEncoder


@dataclass(frozen=True, kw_only=True)
class TextClassifierConfig:
    """Sizes and choices of a `TextClassifier`.

    A word is the concatenation of those that are given: a vector of width `dim` from a table of `vocabulary` words; a
    vector of width `character_dim` from its spelling in an alphabet of `characters`; a state of width `encoder_dim`
    from an encoder passed to the model, which is trained too if `tuned`.

    A bidirectional RNN of `layers` reads the words, `hidden` wide in all; with `layers=0` their order does not matter.
    Then `queries` attend to the text, in `heads`, by a score with a hidden layer of width `score` (Lin et al. 2017).
    `apart` weights the penalty on queries that attend to the same words (eq. 8). `smoothing` acts in training only,
    `padding` is the id of padding.
    """

    classes: int
    vocabulary: int | None = None
    characters: int | None = None
    encoder_dim: int | None = None
    tuned: bool = True
    dim: int = 128
    character_dim: int = 64
    hidden: int = 256
    layers: int = 1
    cell: Cell = "lstm"
    queries: int = 1
    heads: int = 1
    score: int = 128
    apart: float = 0.0
    padding: int | None = 0
    dropout: float = 0.3
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("classes", "dim", "character_dim", "hidden", "queries", "heads", "score"):
            check_int(name, getattr(self, name), least=1)
        check_int("layers", self.layers)
        given = [name for name in ("vocabulary", "characters", "encoder_dim") if getattr(self, name) is not None]
        if not given:
            raise ValueError(
                "words need at least one kind of vector; pass vocabulary, characters, encoder_dim or several of them"
            )
        for name in given:
            check_int(name, getattr(self, name), least=1)
        check_choice("cell", self.cell, Cell)
        for name in ("dropout", "smoothing"):
            check_probability(name, getattr(self, name))
        check_flag("tuned", self.tuned)
        check_number("apart", self.apart)
        if self.vocabulary is not None and self.padding is not None:
            check_token_id("padding", self.padding, self.vocabulary)

    @classmethod
    def pooled(cls, *, classes: int, vocabulary: int) -> Self:
        """Word vectors and attention over them, nothing else: the order of words does not matter."""
        return cls(classes=classes, vocabulary=vocabulary, layers=0)

    @classmethod
    def structured(cls, *, classes: int, vocabulary: int, characters: int | None = None) -> Self:
        """An RNN over the words and several queries that must differ, after Lin et al. 2017."""
        return cls(classes=classes, vocabulary=vocabulary, characters=characters, queries=4, apart=0.03)


class TextClassifier(nn.Module):
    """A class for each text, from a weighted mean of its words.

    >>> model = TextClassifier(TextClassifierConfig(classes=2, vocabulary=1000)).eval()
    >>> ids, lengths = torch.randint(1, 1000, (3, 9)), torch.tensor([9, 4, 6])
    >>> model(ids, lengths=lengths).shape
    torch.Size([3, 2])
    >>> from regard.lens import capture
    >>> with capture(model) as tape:
    ...     logits = model(ids, lengths=lengths)
    >>> tape["pool"]
    Weights(3 x 1 x 1 x 9, score=Dot(scale=1.0), mask=Padding(int64[3]))

    An encoder is called as `encoder(ids, keep=lengths)` and returns a state for each word, as a `Bert` does:

    >>> from regard.models import Bert, BertConfig
    >>> bert = Bert(BertConfig.tiny(vocabulary=1000))
    >>> config = TextClassifierConfig(classes=2, encoder_dim=bert.config.dim, tuned=False, layers=0)
    >>> TextClassifier(config, encoder=bert)(ids, lengths=lengths).shape
    torch.Size([3, 2])
    """

    def __init__(self, config: TextClassifierConfig, *, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.words = WordEncoder(
            config.vocabulary,
            config.dim,
            characters=config.characters,
            character_dim=config.character_dim,
            encoder=encoder,
            encoder_dim=config.encoder_dim,
            tuned=config.tuned,
            padding=config.padding,
        )
        self.rnn = _rnn(config, self.words.width) if config.layers else None
        width = config.hidden if config.layers else self.words.width
        self.pool = AttentionPool(width, queries=config.queries, heads=config.heads, hidden=config.score)
        self.dropout = Dropout(config.dropout)
        self.classes = nn.Linear(config.queries * width, config.classes)

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        characters: Int[Tensor, "b *n c"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b classes"]:
        """Return the logits; `characters` are those of `WordEncoder`."""
        return self._classify(self.states(ids, characters, lengths=lengths), lengths)

    def states(
        self,
        ids: Int[Tensor, "b n"],
        characters: Int[Tensor, "b *n c"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        """Return the state of each word, to which attention is computed."""
        x = self.dropout(self.words(ids, characters, lengths))
        return x if self.rnn is None else self.dropout(self.rnn(x, lengths))

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the loss of `label` (b,), from `ids`, `ids_lengths` if rows are padded, and `characters` if used."""
        check_keys(batch, "ids", "label")
        lengths, config = batch.get("ids_lengths"), self.config
        x = self.states(batch["ids"], batch.get("characters"), lengths=lengths)
        smoothing = config.smoothing if self.training else 0.0
        each = cross_entropy_per_target(self._classify(x, lengths), batch["label"], smoothing=smoothing)
        if config.apart:
            each = each + config.apart * sameness(self.pool.weights(x, lengths)[...])
        return Loss(each.sum(), len(each))

    def _classify(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        return self.classes(self.dropout(self.pool(x, lengths).flatten(1)))


def sameness(A: Float[Tensor, "b h r n"]) -> Float[Tensor, " b"]:
    """||A A^T - I||^2, the mean over heads: how far the rows are from each attending to one position of its own.

    Lin et al. 2017, eq. 8.
    """
    overlap = A @ A.mT - torch.eye(A.shape[2], dtype=A.dtype, device=A.device)
    return overlap.square().sum((2, 3)).mean(1)


def _rnn(config: TextClassifierConfig, width: int) -> Bidirectional:
    return Bidirectional(width, config.hidden, layers=config.layers, cell=config.cell, dropout=config.dropout)
