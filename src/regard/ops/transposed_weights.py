"""A.T: the matrix that is never stored, read the other way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks.products import factor, transposed_product
from .fused import kernel_reductions as fused
from .indexing import split
from .memory_limit import LIMIT

if TYPE_CHECKING:
    from .weights import Weights


class Transposed:
    """A.T: dims b h j i."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def shape(self) -> torch.Size:
        *lead, i, j = self._weights.shape
        return torch.Size((*lead, j, i))

    @property
    def T(self) -> Weights:
        """A again."""
        return self._weights

    def __repr__(self) -> str:
        return f"{self._weights!r}.T"

    def __matmul__(self, x: Tensor) -> Tensor:
        """A.T @ x, x with dims b g i e (g, h or 1 heads), in the dtype of A."""
        if not isinstance(x, Tensor):
            return NotImplemented
        A = self._weights
        x = factor(A.call, x, A.call.shape[2], "A.T @ x")
        if A._has_kernel() and not A._differentiated() and not (torch.is_grad_enabled() and x.requires_grad):
            with A._numbers():
                return A._restore(fused.transposed_product(A.call, A._fused_statistic(), x))
        return A._reduce(transposed_product(x))

    def __getitem__(self, index: Any) -> Tensor:
        ids, rest = split(index, self.shape, self._weights.device)
        swapped = (*ids[:-2], ids[-1], ids[-2])
        A = self._weights
        return A[tuple(x.view([-1 if m == n else 1 for m in range(len(ids))]) for n, x in enumerate(swapped))].mT[rest]

    def dense(self, limit: str = LIMIT) -> Tensor:
        """The whole transposed matrix."""
        return self._weights.dense(limit).mT
