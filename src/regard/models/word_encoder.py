"""WordEncoder: word vectors from a table, from characters, and from an encoder in context."""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import check_token_rows
from ..nn import CharacterEmbedding, TokenEmbedding
from ..nn.embeddings import call_with_keep

FILTER_WIDTHS = (2, 3, 4, 5)  # in characters


class WordEncoder(nn.Module):
    """[table[word]; cnn(its characters); its state in an encoder]: one of them, or several concatenated.

    >>> words = WordEncoder(1000, 64, characters=100, character_dim=32)
    >>> ids, characters = torch.tensor([[5, 7]]), torch.randint(1, 100, (1, 2, 9))
    >>> words(ids, characters).shape
    torch.Size([1, 2, 96])

    Characters are (b, n, c), padded with 0 after each word, or flattened to (b, n * c), as in batches of `regard.data`:

    >>> torch.equal(words(ids, characters.flatten(1)), words(ids, characters))
    True

    An encoder with states of width `encoder_dim` is called as `encoder(ids, keep=lengths)`, as a `Bert` is. Unless
    `tuned` it is not trained, and stays in evaluation mode.
    """

    def __init__(
        self,
        vocabulary: int | None,
        dim: int,
        *,
        characters: int | None = None,
        character_dim: int = 64,
        encoder: nn.Module | None = None,
        encoder_dim: int | None = None,
        tuned: bool = True,
        padding: int | None = 0,
    ) -> None:
        super().__init__()
        if (encoder is None) != (encoder_dim is None):
            raise ValueError(
                "an encoder and encoder_dim, the width of its states, come together, got "
                f"encoder_dim={encoder_dim} and {'no encoder' if encoder is None else type(encoder).__name__}"
            )
        self.table = None if vocabulary is None else TokenEmbedding(vocabulary, dim, padding=padding)
        filters = dict.fromkeys(FILTER_WIDTHS, character_dim)
        self.spelling = None if characters is None else CharacterEmbedding(characters, character_dim, filters=filters)
        self.encoder = encoder if encoder is None or tuned else encoder.requires_grad_(False)
        self.tuned = tuned
        widths = ((self.table, dim), (self.spelling, character_dim), (encoder, encoder_dim or 0))
        self.width = sum(width for part, width in widths if part is not None)
        self.train()

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        characters: Int[Tensor, "b *n c"] | None = None,
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        check_token_rows("ids", ids)
        vectors = [] if self.table is None else [self.table(ids)]
        if self.spelling is not None:
            if characters is None:
                raise ValueError(
                    "characters must be given because this model reads the spelling of words; pass (b, n, c)"
                )
            vectors.append(self.spelling(characters_per_word(characters, ids)))
        elif characters is not None:
            raise ValueError(
                "characters must be None because this model was built without characters=; leave them out, or build it "
                "with characters=, the number of different characters"
            )
        if self.encoder is not None:
            vectors.append(call_with_keep(self.encoder, ids, keep=lengths))
        return torch.cat(vectors, -1)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; an encoder that is not trained stays in evaluation mode."""
        super().train(mode)
        if self.encoder is not None and not self.tuned:
            self.encoder.eval()
        return self


def characters_per_word(characters: Int[Tensor, "b *n c"], ids: Int[Tensor, "b n"]) -> Int[Tensor, "b n c"]:
    """Return characters as (b, n, c), from (b, n, c) or flattened (b, n * c)."""
    b, n = ids.shape
    fits = characters.shape[:2] == ids.shape if characters.ndim == 3 else characters.ndim == 2 and len(characters) == b
    if not fits or characters.shape[1] % max(n, 1):
        raise ValueError(
            f"characters must be (b, n, c), or (b, n * c), for ids {(b, n)}, got shape {tuple(characters.shape)}"
        )
    return characters.reshape(b, n, -1)
