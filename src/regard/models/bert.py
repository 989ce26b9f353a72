"""Bert: an encoder in which every token attends to every other, and the losses of its pretraining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..argument_hints import CALLS, PADDING, with_argument_hints
from ..checks import (
    check_choice,
    check_eps,
    check_flag,
    check_int,
    check_keys,
    check_probability,
    check_submodel,
    check_token_id,
    check_token_rows,
)
from ..nn import Attention, EncoderBlock, FeedForward, LearnedPositions, PostNorm, TokenEmbedding, positions_of
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy
from .initialization import initialize
from .named_choices import Activation, activation_named
from .padding import Padded, keep_of


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes and choices of a `Bert`; the presets are those of Devlin et al. 2019 and Turc et al. 2019.

    >>> BertConfig.base().depth, BertConfig.large().dim
    (12, 1024)

    `types` is the number of token types, such as question and document; 0 for no table of types. Positions count from
    `first`, 0 in BERT and 2 in RoBERTa, and stay below `length`. `pooler` adds a layer over the first token, for tasks
    on whole sequences. `padding` is the id of padding.
    """

    vocabulary: int
    length: int = 512
    types: int = 2
    first: int = 0
    dim: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    activation: Activation = "gelu"
    pooler: bool = True
    eps: float = 1e-12
    padding: int | None = 0
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "dim", "depth", "heads", "hidden"):
            check_int(name, getattr(self, name), least=1)
        for name in ("types", "first"):
            check_int(name, getattr(self, name))
        check_choice("activation", self.activation, Activation)
        for name in ("dropout", "attention_dropout"):
            check_probability(name, getattr(self, name))
        check_flag("pooler", self.pooler)
        check_eps(self.eps)
        if self.padding is not None:
            check_token_id("padding", self.padding, self.vocabulary)

    @classmethod
    def tiny(cls, *, vocabulary: int = 30522) -> Self:
        """2 layers of width 128, 4 million parameters."""
        return cls(vocabulary=vocabulary, dim=128, depth=2, heads=2, hidden=512)

    @classmethod
    def mini(cls, *, vocabulary: int = 30522) -> Self:
        """4 layers of width 256, 11 million parameters."""
        return cls(vocabulary=vocabulary, dim=256, depth=4, heads=4, hidden=1024)

    @classmethod
    def small(cls, *, vocabulary: int = 30522) -> Self:
        """4 layers of width 512, 29 million parameters."""
        return cls(vocabulary=vocabulary, dim=512, depth=4, heads=8, hidden=2048)

    @classmethod
    def medium(cls, *, vocabulary: int = 30522) -> Self:
        """8 layers of width 512, 41 million parameters."""
        return cls(vocabulary=vocabulary, dim=512, depth=8, heads=8, hidden=2048)

    @classmethod
    def base(cls, *, vocabulary: int = 30522) -> Self:
        """12 layers of width 768, 109 million parameters."""
        return cls(vocabulary=vocabulary)

    @classmethod
    def large(cls, *, vocabulary: int = 30522) -> Self:
        """24 layers of width 1024, 335 million parameters."""
        return cls(vocabulary=vocabulary, dim=1024, depth=24, heads=16, hidden=4096)


class Bert(nn.Module):
    """A Transformer encoder with learned positions: a vector for each token, which depends on all (Devlin et al. 2019).

    >>> bert = Bert(BertConfig.tiny(vocabulary=100)).eval()
    >>> ids = torch.randint(1, 100, (2, 7))
    >>> x = bert(ids, keep=torch.tensor([7, 4]))
    >>> x.shape, bert.pool(x).shape
    (torch.Size([2, 7, 128]), torch.Size([2, 128]))

    `types` is the type of each token (default: all 0). `keep` is lengths `(b,)` or keep `(b, n)`,
    True = a real token, on either side: positions count real tokens only.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.words = TokenEmbedding(config.vocabulary, config.dim, padding=config.padding)
        self.positions = LearnedPositions(config.length, config.dim)
        self.types = TokenEmbedding(config.types, config.dim) if config.types else None
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.pool = FirstTokenPool(config.dim) if config.pooler else None
        initialize(self)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(
        self,
        ids: Int[Tensor, "b n"],
        types: Int[Tensor, "b n"] | None = None,
        *,
        keep: Padded | None = None,
    ) -> Float[Tensor, "b n dim"]:
        check_token_rows("ids", ids)
        keep = None if keep is None else keep_of(keep, ids)
        positions = torch.arange(ids.shape[1], device=ids.device) if keep is None else positions_of(keep)
        x = self.words(ids) + self.positions(positions + self.config.first)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        elif types is not None:
            raise ValueError("types must be None because this Bert has no table of types; build it with types=2")
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, keep=keep)
        return x


class FirstTokenPool(nn.Module):
    """activation(W x_0 + b): the first real token stands for the whole sequence."""

    def __init__(self, dim: int, *, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.activation = activation
        initialize(self)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(self, x: Float[Tensor, "b n dim"], keep: Padded | None = None) -> Float[Tensor, "b dim"]:
        """Return the pooled vector; `keep` is that of `Bert`."""
        if keep is None:
            return self.activation(self.dense(x[:, 0]))
        first = keep_of(keep, x[..., 0]).int().argmax(1)
        return self.activation(self.dense(x[torch.arange(len(x), device=x.device), first]))


class BertPretraining(nn.Module):
    """Prediction of masked words, and of whether the second sentence follows the first (Devlin et al. 2019, sec. 3.1).

    >>> model = BertPretraining(Bert(BertConfig.tiny(vocabulary=100))).eval()
    >>> from regard.models import mask_words
    >>> ids = torch.randint(5, 100, (2, 7))
    >>> model(ids).shape, model.follows(ids).shape
    (torch.Size([2, 7, 100]), torch.Size([2, 2]))
    >>> masked, targets = mask_words(ids, mask=4, vocabulary=100, special=(0, 1, 2, 3, 4))
    >>> model.loss({"ids": masked, "targets": targets, "next": torch.tensor([0, 1])}).count == (targets >= 0).sum()
    tensor(True)

    The output layer shares the table of the embedding. RoBERTa predicts no next sentence: `next_sentence=False`.
    """

    def __init__(self, bert: Bert, *, next_sentence: bool = True) -> None:
        super().__init__()
        check_submodel("bert", bert, "Bert", "BertPretraining")
        if next_sentence and bert.pool is None:
            raise ValueError("next_sentence=True needs bert.pool, which this Bert lacks; build it with pooler=True")
        config = bert.config
        self.bert = bert
        self.dense = nn.Linear(config.dim, config.dim)
        self.activation = activation_named(config.activation)
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.next = nn.Linear(config.dim, 2) if next_sentence else None
        for head in (self.dense, self.next):
            if head is not None:
                initialize(head)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(
        self, ids: Int[Tensor, "b n"], types: Int[Tensor, "b n"] | None = None, *, keep: Padded | None = None
    ) -> Float[Tensor, "b n vocabulary"]:
        """Return the logits of the word at each position."""
        return self.words(self.bert(ids, types, keep=keep))

    @with_argument_hints(CALLS, renamed=PADDING)
    def follows(
        self, ids: Int[Tensor, "b n"], types: Int[Tensor, "b n"] | None = None, *, keep: Padded | None = None
    ) -> Float[Tensor, "b 2"]:
        """Return the logits of two classes: 0 if the second sentence (type 1) follows the first, 1 if not."""
        return self._follows(self.bert(ids, types, keep=keep), keep)

    def words(self, hidden: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b vocabulary"]:
        """Return the logits of words from the states of `bert`."""
        return self.bert.words.logits(self.norm(self.activation(self.dense(hidden)))) + self.bias

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the loss over `targets` (b, n), the ids of masked words negative elsewhere, and `next` (b,) if given.

        As published, it is the mean over the words plus the mean over the pairs. `count` is the number of words.
        """
        check_keys(batch, "ids", "targets")
        targets, keep = batch["targets"], batch.get("ids_lengths")
        hidden = self.bert(batch["ids"], batch.get("types"), keep=keep)
        is_masked = targets >= 0
        if _is_captured(hidden):
            # A CUDA graph cannot depend on the number of masked words: predict all words, count the masked ones.
            words = cross_entropy(self.words(hidden), targets, counted=is_masked)
        else:
            words = cross_entropy(self.words(hidden[is_masked]), targets[is_masked])
        if "next" not in batch:
            return words
        follows = cross_entropy(self._follows(hidden, keep), batch["next"])
        return Loss(words.sum + follows.mean * words.count, words.count)

    def _follows(self, hidden: Tensor, keep: Padded | None) -> Tensor:
        if self.next is None or self.bert.pool is None:
            raise ValueError("this model predicts no next sentence; build it with next_sentence=True")
        return self.next(self.bert.pool(hidden, keep))


def _is_captured(x: Tensor) -> bool:
    """Return whether operations on x are being recorded for a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _block(config: BertConfig) -> EncoderBlock:
    attention = Attention(config.dim, config.heads, dropout=config.attention_dropout)
    feedforward = FeedForward(config.dim, config.hidden, activation=activation_named(config.activation))
    norm = partial(nn.LayerNorm, eps=config.eps)
    return EncoderBlock(attention, feedforward, residual=PostNorm, norm=norm, dropout=config.dropout)
