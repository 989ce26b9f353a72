"""Tensors and lengths that the tests of the operator share."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = torch.tensor([40, 23])


def qkv(
    n: int = 40, m: int | None = None, heads: int = 4, shared: int | None = None, d: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, heads, n, d),
        torch.randn(2, shared or heads, m or n, d),
        torch.randn(2, shared or heads, m or n, d),
    )
