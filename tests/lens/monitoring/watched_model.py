"""A small model of two layers of attention over padded token ids, which trains in a second."""

from __future__ import annotations

import torch
from torch import nn

from regard import Causal
from regard.nn import Attention

VOCABULARY, WIDTH, HEADS = 11, 16, 4


class Watched(nn.Module):
    """Predicts the next token; token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention(WIDTH, heads=HEADS, kv_heads=2, mask=Causal()) for _ in range(2))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, keep=tokens != 0)
        return self.out(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        counted = tokens[:, 1:] != 0
        logits = self(tokens)[:, :-1]
        return nn.functional.cross_entropy(logits[counted], tokens[:, 1:][counted])


def batches(count: int = 6, rows: int = 4) -> list[torch.Tensor]:
    """Batches of token ids, padded with 0 at the end of some rows."""
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(1, VOCABULARY, (count, rows, 9), generator=generator)
    found[:, ::2, 6:] = 0
    return list(found)
