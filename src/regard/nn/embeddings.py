"""Embeddings: from ids to vectors, by a table, from characters or pieces, or through another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..argument_hints import CALLS, KEEP, with_argument_hints
from ..ops.torch_state import can_read_values
from .dropout import Dropout

KIM_FILTERS = MappingProxyType({1: 25, 2: 50, 3: 75, 4: 100, 5: 125, 6: 150})  # number of filters by width


class TokenEmbedding(nn.Module):
    """scale * table[id]: a vector for each word, subword or token type.

    >>> words, types = TokenEmbedding(1000, 16, padding=0), TokenEmbedding(2, 16)
    >>> words(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 3, 16])

    The vector of the id `padding` is 0 and is not trained. The Transformer scales by sqrt(dim) (Vaswani et al. 2017,
    section 3.4). `logits` uses the same table as an output layer (Press and Wolf 2017).
    """

    def __init__(self, size: int, dim: int, *, padding: int | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Embedding(size, dim, padding_idx=padding)
        self.scale = scale
        nn.init.normal_(self.table.weight, std=dim**-0.5)
        self._zero_padding_vector()

    @classmethod
    def of(cls, vectors: Float[Tensor, "size dim"], *, padding: int | None = None) -> Self:
        """Build a table of pretrained vectors, one per row; `Frozen(TokenEmbedding.of(vectors))` keeps them fixed."""
        embedding = cls(*vectors.shape, padding=padding)
        embedding.table.weight = nn.Parameter(vectors.detach().clone())
        embedding._zero_padding_vector()
        return embedding

    def forward(self, ids: Int[Tensor, "*b"]) -> Float[Tensor, "*b dim"]:
        try:
            x: Tensor = self.table(ids)
        except IndexError:  # raised by PyTorch, which checks every id anyway
            if not can_read_values(ids):
                raise
            low, high = (int(x) for x in ids.aminmax())
            raise ValueError(
                f"ids must be from 0 to {self.table.num_embeddings - 1}, the rows of this table, got "
                f"{low if low < 0 else high}; encode with the model's own tokenizer, or build a larger table"
            ) from None
        return x if self.scale == 1 else x * self.scale

    def logits(self, h: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b size"]:
        """Return h . table[id] for each id, unscaled: an output layer that shares the table."""
        return nn.functional.linear(h, self.table.weight)

    def _zero_padding_vector(self) -> None:
        if self.table.padding_idx is not None:
            nn.init.zeros_(self.table.weight[self.table.padding_idx])


class SubwordEmbedding(nn.Module):
    """The mean of a word's pieces, from ids `(b, n, pieces)`: n-grams or subwords (Bojanowski et al. 2017).

    >>> SubwordEmbedding(1000, 16)(torch.tensor([[[5, 7, 0], [9, 0, 0]]])).shape
    torch.Size([1, 2, 16])

    Pieces with the id `padding` are left out of the mean; a word without other pieces has the vector 0.
    """

    def __init__(self, size: int, dim: int, *, padding: int = 0) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(size, dim, mode="mean", padding_idx=padding)

    def forward(self, ids: Int[Tensor, "*b pieces"]) -> Float[Tensor, "*b dim"]:
        return self.table(ids.flatten(0, -2)).unflatten(0, ids.shape[:-1])


class CharacterEmbedding(nn.Module):
    """A word's vector from its characters, ids `(b, n, characters)`: convolutions, the maximum of each, a highway.

    >>> CharacterEmbedding(128, 64)(torch.randint(1, 128, (2, 5, 11))).shape
    torch.Size([2, 5, 64])

    Kim et al. 2016, sections 2.2 and 2.3. `filters` maps a width to the number of filters (default: those of the
    paper). The id `padding` fills words up at the end; the amount of padding does not change the vector, and a word of
    padding alone has the vector 0.
    """

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        character_dim: int = 15,
        filters: Mapping[int, int] = KIM_FILTERS,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.widths = tuple(filters)
        self.characters = nn.Embedding(size, character_dim, padding_idx=padding)
        self.convolutions = nn.ModuleList(nn.Conv1d(character_dim, count, width) for width, count in filters.items())
        self.highway = Highway(sum(filters.values()))
        self.project = nn.Linear(sum(filters.values()), dim)

    def forward(self, ids: Int[Tensor, "*b characters"]) -> Float[Tensor, "*b dim"]:
        words = ids.flatten(0, -2)  # words characters
        real = words != self.padding
        x = self.characters(words).mT  # words character_dim characters
        maxima = []
        for width, convolution in zip(self.widths, self.convolutions, strict=True):
            # A window starts at each character of the word and may extend past its end, into zeros. So padding adds
            # no window, and a word shorter than the filter still has one.
            hits = torch.tanh(convolution(nn.functional.pad(x, (0, width - 1))))
            maxima.append(hits.masked_fill(~real[:, None], -1.0).amax(-1))  # tanh is never below -1
        word = self.project(self.highway(torch.cat(maxima, -1)))
        return (word * real.any(-1, keepdim=True)).unflatten(0, ids.shape[:-1])


class Highway(nn.Module):
    """t * relu(W x + b) + (1 - t) * x, t = sigmoid(V x + c) (Srivastava et al. 2015, eq. 3). c starts at -2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.change = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, -2.0)

    def forward(self, x: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b dim"]:
        t = torch.sigmoid(self.gate(x))
        return t * torch.relu(self.change(x)) + (1 - t) * x


class ContextualEmbedding(nn.Module):
    """The hidden states of a pretrained model as embeddings.

    >>> reader = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 16))  # from ids to states: a Bert, say
    >>> ContextualEmbedding(Frozen(reader))(torch.tensor([[5, 7]])).shape
    torch.Size([1, 2, 16])

    The model is called with the same inputs, and with `keep` if given (lengths, or True = a real token). It is
    trained too, unless it is wrapped as `Frozen(model)`. For a model that returns the states of all its layers, as a
    sequence, pass their number as `layers`: the states are mixed as gamma sum_l softmax(w)_l h_l, w and gamma learned
    (Peters et al. 2018, eq. 1).
    """

    def __init__(self, model: nn.Module, *, layers: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.mix = None if layers is None else LayerMix(layers)

    @with_argument_hints(CALLS, renamed=KEEP)
    def forward(self, *inputs: Tensor, keep: Tensor | None = None) -> Float[Tensor, "b n dim"]:
        states = call_with_keep(self.model, *inputs, keep=keep)
        if self.mix is not None:
            return self.mix(states)
        if not isinstance(states, Tensor):
            raise TypeError(
                f"the model must return a tensor of states (b, n, dim), got {type(states).__name__}; "
                "for the states of several layers pass layers=, their number"
            )
        return states


class LayerMix(nn.Module):
    """gamma sum_l softmax(w)_l h_l: a learned mean over the layers of a model (Peters et al. 2018, eq. 1)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, states: Sequence[Float[Tensor, "*b dim"]]) -> Float[Tensor, "*b dim"]:
        if len(states) != len(self.shares):
            raise ValueError(
                f"states must be those of {len(self.shares)} layers, got {len(states)}; pass layers={len(states)}"
            )
        shares = self.shares.softmax(0)
        return self.gamma * sum(share * h for share, h in zip(shares, states, strict=True))


class Frozen(nn.Module):
    """A module that is not trained: no gradients, and evaluation mode even while the model around it trains.

    >>> Frozen(nn.Dropout(0.5)).train()(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.requires_grad_(False).eval()

    @with_argument_hints(CALLS, renamed=KEEP)
    def forward(self, *inputs: Tensor, keep: Tensor | None = None) -> Any:
        with torch.no_grad():
            return call_with_keep(self.module, *inputs, keep=keep)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the wrapper; the module inside stays in evaluation mode."""
        super().train(mode)
        self.module.eval()
        return self


class SumEmbedding(nn.Module):
    """dropout(norm(sum_k embedding_k(ids_k))): words, types and so on, added up (Devlin et al. 2019, figure 2).

    >>> bert = SumEmbedding(TokenEmbedding(1000, 16, padding=0), TokenEmbedding(2, 16), norm=nn.LayerNorm(16))
    >>> bert(torch.tensor([[5, 7, 9]]), torch.tensor([[0, 0, 1]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, *embeddings: nn.Module, norm: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embeddings)
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = Dropout(dropout)

    def forward(self, *ids: Tensor) -> Float[Tensor, "b n dim"]:
        first, *others = _embed_each(self.embeddings, ids)
        return self.dropout(self.norm(sum(others, first)))


class ConcatEmbedding(nn.Module):
    """dropout([embedding_1(ids_1); embedding_2(ids_2); ...]): words beside characters beside contextual states.

    >>> both = ConcatEmbedding(TokenEmbedding(1000, 16), CharacterEmbedding(128, 8))
    >>> both(torch.tensor([[5, 7]]), torch.randint(1, 128, (1, 2, 9))).shape
    torch.Size([1, 2, 24])
    """

    def __init__(self, *embeddings: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embeddings)
        self.dropout = Dropout(dropout)

    def forward(self, *ids: Tensor) -> Float[Tensor, "b n dim"]:
        return self.dropout(torch.cat(_embed_each(self.embeddings, ids), -1))


def call_with_keep(model: nn.Module, *inputs: Tensor, keep: Tensor | None) -> Any:
    """Call a model, with `keep` if given; a model that names it `padding` or `key_padding` gets it by that name."""
    if keep is None:
        return model(*inputs)
    names = signature(model.forward).parameters
    name = next((name for name in ("padding", "key_padding") if name in names), "keep")
    return model(*inputs, **{name: keep})


def _embed_each(embeddings: nn.ModuleList, ids: tuple[Tensor, ...]) -> list[Tensor]:
    if len(ids) != len(embeddings):
        raise ValueError(f"pass one tensor of ids for each of the {len(embeddings)} embeddings, got {len(ids)}")
    return [embedding(x) for embedding, x in zip(embeddings, ids, strict=True)]
