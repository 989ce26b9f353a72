"""Initial weights of GPT-2, BERT and ViT."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def std_for_width(width: int) -> float:
    """Return the standard deviation for a matrix of this width, scaled from the published 0.02 at width 768."""
    return 0.02 * math.sqrt(768 / width)


def initialize(model: nn.Module, *, std: float = 0.02) -> None:
    """Draw matrices and embedding tables from a normal distribution and set biases to 0; norms are not changed."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])


def initialize_residual(blocks: Sequence[nn.Module], *, std: float = 0.02) -> None:
    """Draw projections into the residual stream with std / sqrt(2 * layers) (Radford et al. 2019, sec. 2.3)."""
    for block in blocks:
        for name in ("attention.out.weight", "feedforward.down.weight"):
            nn.init.normal_(block.get_parameter(name), std=std / math.sqrt(2 * len(blocks)))
