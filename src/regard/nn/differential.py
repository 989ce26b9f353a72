"""Differential attention: each head subtracts one softmax from another, which cancels what both see."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..checks import check_int
from ..ops.operator import weights
from ..ops.terms.masks.mask_algebra import Mask
from ..ops.weights import Weights
from .attention import padding_of_last_keys
from .cache import KVCache
from .core import Core
from .linear import project
from .norms import RMSNorm
from .positions import Rotary


class DifferentialAttention(nn.Module):
    """(softmax(q1 k1) - l softmax(q2 k2)) v of each head, normalized, times 1 - l0 (Ye et al. 2024, eq. 1 to 3).

    >>> from regard import Causal
    >>> layer = DifferentialAttention(64, heads=4, kv_heads=2, depth=3, mask=Causal())
    >>> layer(torch.randn(2, 7, 64)).shape, round(layer.start, 3)
    (torch.Size([2, 7, 64]), 0.471)

    Queries and keys of both softmaxes are dim / (2 heads) wide, values twice as much. `l` is learned for the layer from
    l0 = 0.8 - 0.6 exp(-0.3 (depth - 1)), where `depth` counts layers from 1. `mask`, `rotary` and `kv_heads` are those
    of `Attention`, and so are `keep`, `positions` and `cache` of a call.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        depth: int = 1,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_int("heads", heads, least=1)
        check_int("depth", depth, least=1)
        self.dim, self.heads, self.kv_heads = dim, heads, heads if kv_heads is None else kv_heads
        if dim % (2 * heads) or heads % self.kv_heads:
            raise ValueError(
                f"dim must be a multiple of 2 * heads and heads of kv_heads, got dim={dim}, heads={heads} and "
                f"kv_heads={self.kv_heads}; pass dim={2 * heads * -(-dim // (2 * heads))} and kv_heads=1"
            )
        self.head_dim = dim // (2 * heads)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
        narrow = 2 * self.head_dim * self.kv_heads
        self.query, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.key, self.value = nn.Linear(dim, narrow, bias=False), nn.Linear(dim, narrow, bias=False)
        self.exponents = nn.Parameter(torch.randn(2, 2, self.head_dim) * 0.1)  # softmax, query or key, feature
        self.norm = RMSNorm(2 * self.head_dim)
        self.mask, self.rotary = mask, rotary
        self.core = Core(dropout=dropout)
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(linear.weight)

    @property
    def share(self) -> Tensor:
        """The learned number l that the second softmax is multiplied by."""
        first, second = self.exponents.prod(1).sum(-1).exp()
        return first - second + self.start

    def forward(
        self,
        x: Float[Tensor, "b i dim"],
        *,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
        positions: Int[Tensor, "*b new"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "b i dim"]:
        """Self-attention of x, behind the tokens of the cache."""
        if cache is not None:
            cache.check_one_length()
        q, k = self._queries_and_keys(x, positions, cache)
        v = project(self.value, x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        terms = self._terms(keep, k.shape[2], cache)
        if cache is not None:
            k, v = cache.append(k, v)
        first, second = (self.core(*pair, v, **terms) for pair in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
        heads = self.norm(first - self.share.to(first.dtype) * second) * (1 - self.start)
        return project(self.out, heads.transpose(1, 2).flatten(2))

    def weights(
        self,
        x: Float[Tensor, "b i dim"],
        *,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
        positions: Int[Tensor, "*b new"] | None = None,
    ) -> tuple[Weights, Weights]:
        """Return the lazy weights of both softmaxes; the heads multiply the values by A - `share` B."""
        q, k = self._queries_and_keys(x, positions, None)
        terms = self._terms(keep, k.shape[2], None)
        first, second = (weights(*pair, **terms) for pair in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
        return first, second

    def _queries_and_keys(self, x: Tensor, positions: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """The queries of both softmaxes side by side, `b h i 2d`, and the new keys, `b g j 2d`."""
        q, k = (
            part.unflatten(-1, (n, -1)).transpose(1, 2)
            for part, n in ((project(self.query, x), self.heads), (project(self.key, x), self.kv_heads))
        )
        if self.rotary is None:
            return q, k
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + x.shape[1], device=x.device) if positions is None else positions
        angles = self.rotary.angles(k, positions)
        q, k = (torch.cat([self.rotary.rotate(half, *angles) for half in both.chunk(2, -1)], -1) for both in (q, k))
        return q, k

    def _terms(self, keep: Tensor | None, new: int, cache: KVCache | None) -> dict[str, Any]:
        past, before = (0, 0) if cache is None else (cache.kept, cache.length)
        padding = None if keep is None else padding_of_last_keys(keep, past + new, before + new)
        return {"mask": padding if self.mask is None else self.mask if padding is None else self.mask & padding}

    def new_cache(self) -> KVCache:
        """Return an empty cache."""
        return KVCache()

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, mask={self.mask!r}"
