"""Norms, and residual connections with the norm before or after the sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .dropout import Dropout

Norm = Callable[[int], nn.Module]  # from a width to a norm of this width
Residual = Callable[..., nn.Module]  # from (dim, norm=, dropout=) to a module of (x, sublayer)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, eq. 4).

    The mean is computed in float32 or better; the result has the dtype of x before it is multiplied by the weight.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b dim"]:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class PreNorm(nn.Module):
    """x + dropout(f(norm(x))): the residual stream stays unnormalized (Xiong et al. 2020).

    `norm` makes the norm from its width: `nn.LayerNorm`, `RMSNorm`, `partial(nn.LayerNorm, eps=1e-12)`.
    """

    def __init__(self, dim: int, *, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "b n dim"], f: Callable[[Tensor], Tensor]) -> Float[Tensor, "b n dim"]:
        added = f(self.norm(x))
        return x + (self.dropout(added) if self.training else added)


class PostNorm(nn.Module):
    """norm(x + dropout(f(x))): the Transformer as published (Vaswani et al. 2017, sec. 3.1)."""

    def __init__(self, dim: int, *, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "b n dim"], f: Callable[[Tensor], Tensor]) -> Float[Tensor, "b n dim"]:
        added = f(x)
        return self.norm(x + (self.dropout(added) if self.training else added))
