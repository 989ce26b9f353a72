"""Initial weights as GPT-2, BERT and ViT have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def spread(width: int) -> float:
    """The deviation that lets a matrix of this width pass on as much as one of 0.02 does at 768, as published."""
    return 0.02 * math.sqrt(768 / width)


def initialize(model: nn.Module, *, std: float = 0.02) -> None:
    """Normal matrices and tables, biases of 0; norms, and the vector of a padding id, stay as they are."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])


def initialize_residual(blocks: Sequence[nn.Module], *, std: float = 0.02) -> None:
    """What enters the residual stream, less the more layers do (Radford et al. 2019, sec. 2.3)."""
    for block in blocks:
        for name in ("attention.out.weight", "feedforward.down.weight"):
            nn.init.normal_(block.get_parameter(name), std=std / math.sqrt(2 * len(blocks)))
