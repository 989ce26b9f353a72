"""A @ x and A.T @ x as reductions over blocks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .place import Block
from .problem import Problem, taken
from .rows import Reduction
from .scores import grouped_product


def product(x: Tensor, dropout: float = 0.0) -> Reduction:
    """dropout(A) @ x, x with g, h or 1 heads: `b h i j, b g j e -> b h i e`."""
    seed = int(torch.randint(2**62, ())) if dropout else 0

    def value(problem: Problem, block: Block, A: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        if dropout:
            A = A * _keep(A, dropout, seed, block)
        part = taken(problem, block, x, (block.batch, block.shared(x.shape[1]), block.cols))
        return grouped_product(A, part.to(A.dtype))

    return Reduction(value, "rows", (x.shape[-1],), x)


def transposed_product(x: Tensor) -> Reduction:
    """A.T @ x, x with g, h or 1 heads: `b h i j, b g i e -> b h j e`."""

    def value(problem: Problem, block: Block, A: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        part = block.take(x, (block.batch, block.shared(x.shape[1]), block.rows)).to(A.dtype)
        part = part.repeat_interleave(A.shape[1] // part.shape[1], 1) if part.shape[1] != A.shape[1] else part
        return A.mT @ part

    return Reduction(value, "keys", (x.shape[-1],), x)


def _keep(A: Tensor, dropout: float, seed: int, block: Block) -> Tensor:
    """Which weights stay, scaled to keep their expectation; the same for the same block, forward and backward."""
    generator = torch.Generator(A.device)
    place = ((block.batch.start * block.n_h + block.heads.start) << 32) + block.rows.start
    generator.manual_seed((seed + place * 0x9E3779B97F4A7C15) % 2**63)
    return torch.empty_like(A).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)
