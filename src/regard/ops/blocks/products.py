"""A @ x and A.T @ x as reductions over blocks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call
from ..terms.coordinates import Block
from ..terms.scores import grouped_product
from .prepared_call import PreparedCall, take_visible
from .reduction import Reduction


def product(x: Tensor, dropout: float = 0.0) -> Reduction:
    """dropout(A) @ x, x with g, h or 1 heads: `b h i j, b g j e -> b h i e`."""
    seed = int(torch.randint(2**62, ())) if dropout else 0

    def value(prepared: PreparedCall, block: Block, A: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        if dropout:
            A = A * _keep(A, dropout, seed, block)
        part = take_visible(prepared, block, x, (block.batch, block.head_slice(x.shape[1]), block.cols))
        return grouped_product(A, part.to(A.dtype))

    return Reduction(value, "rows", (x.shape[-1],), x)


def transposed_product(x: Tensor) -> Reduction:
    """A.T @ x, x with g, h or 1 heads: `b h i j, b g i e -> b h j e`."""

    def value(prepared: PreparedCall, block: Block, A: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        part = block.take(x, (block.batch, block.head_slice(x.shape[1]), block.rows)).to(A.dtype)
        part = part.repeat_interleave(A.shape[1] // part.shape[1], 1) if part.shape[1] != A.shape[1] else part
        return A.mT @ part

    return Reduction(value, "keys", (x.shape[-1],), x)


def check_factor(call: Call, x: Tensor, n: int, what: str) -> Tensor:
    """The other factor of a product that a caller gave, with dims b heads n e."""
    b, h, _, _ = call.shape
    g, lead, shape, device = call.k.shape[1], call.lead, tuple(x.shape), call.q.device
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"{what} takes a floating tensor of dims b heads {n} e, got {x.dtype} {shape}")
    if x.device != device:
        raise ValueError(f"{what}: x must be on {device}, got {x.device}; write x.to(A.device)")
    if x.ndim > 3 and len(lead) != 1 and x.shape[:-3] in (lead, (1,) * len(lead)):
        x = x.expand(*lead, *x.shape[-3:]).flatten(0, -4)
    x = x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x
    if x.ndim != 4 or x.shape[0] not in (1, b) or x.shape[1] not in (1, g, h) or x.shape[2] != n:
        batch = " x ".join(map(str, lead))
        raise ValueError(f"{what} takes x with dims b={batch}, heads 1, {g} or {h}, {n}, e; got shape {shape}")
    return x if x.shape[0] == b else x.expand(b, -1, -1, -1)


def _keep(A: Tensor, dropout: float, seed: int, block: Block) -> Tensor:
    """Which weights stay, scaled to keep their expectation; the same for the same block, forward and backward."""
    generator = torch.Generator(A.device)
    generator.manual_seed(_mix_seed(seed, block.batch.start, block.heads.start, block.rows.start))
    return torch.empty_like(A).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)


def _mix_seed(*numbers: int) -> int:
    """A seed for each tuple of numbers: all of them reach its lower 32 bits, as many as generators of CPUs take."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) * 0x9E3779B97F4A7C15 + 1) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**63
