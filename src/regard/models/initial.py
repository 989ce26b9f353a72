"""Initial weights as GPT-2, BERT and ViT have them, at any width.

Theirs are normal with a deviation of 0.02, at 768 features. A matrix as deep in a narrower model would pass on too
little: the deviation goes with one over the root of the width, which keeps what comes out of a layer as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

TABLES = 0.02  # of what is looked up, not multiplied: words, positions, class tokens


def spread(width: int) -> float:
    """The deviation of the entries of a matrix that takes vectors of this width: 0.02 for 768."""
    return 0.02 * math.sqrt(768 / width)


def initialize(model: nn.Module, *, width: int) -> None:
    """Normal matrices and tables, biases of 0; norms, and the vector of a padding id, stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=spread(width))
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=spread(module.weight[0].numel()))
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=TABLES)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])


def initialize_residual(blocks: Sequence[nn.Module], *, width: int) -> None:
    """What enters the residual stream, less the more layers do (Radford et al. 2019, sec. 2.3)."""
    for block in blocks:
        for name in ("attention.out.weight", "feedforward.down.weight"):
            nn.init.normal_(block.get_parameter(name), std=spread(width) / math.sqrt(2 * len(blocks)))
