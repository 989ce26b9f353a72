"""Feed-forward: the layer that transforms each token by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .dropout import Dropout
from .linear import project

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017, eq. 2), with dropout on the hidden units.

    >>> import torch
    >>> FeedForward(8, 32, activation=F.relu)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])

    The activation is any function or module: `F.relu`, `F.gelu`, `nn.GELU("tanh")`.
    """

    def __init__(
        self, dim: int, hidden: int, *, activation: Activation = F.gelu, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.activation = activation
        self.dropout = Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b dim"]:
        hidden = self.activation(project(self.up, x))
        return project(self.down, self.dropout(hidden) if self.training else hidden)


class GatedFeedForward(nn.Module):
    """(activation(x W1) * (x V)) W2: SwiGLU, and with `F.gelu` GEGLU (Shazeer 2020, eq. 6), with dropout on the hidden
    units.

    Two thirds of the hidden width of a `FeedForward` give the same number of parameters.
    """

    def __init__(
        self, dim: int, hidden: int, *, activation: Activation = F.silu, dropout: float = 0.0, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.activation = activation
        self.dropout = Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b dim"]:
        hidden = self.activation(project(self.gate, x)) * project(self.up, x)
        return project(self.down, self.dropout(hidden) if self.training else hidden)
