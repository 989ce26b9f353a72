"""Multi-head latent attention (MLA): keys and values of all heads come from one short vector a token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..checks import check_int
from ..ops.terms.masks.mask_algebra import Mask
from ..ops.terms.scores import Dot
from .attention import padding_of_last_keys
from .cache import KVCache
from .core import Core
from .linear import project
from .norms import RMSNorm
from .positions import Rotary


class LatentAttention(nn.Module):
    """Attention whose cache holds `latent` + `rotary_dim` numbers a token (DeepSeek-AI 2024, section 2.1).

    >>> from regard import Causal
    >>> layer = LatentAttention(64, heads=4, latent=16, head_dim=8, rotary_dim=4, mask=Causal())
    >>> cache = layer.new_cache()
    >>> with torch.no_grad():
    ...     print(layer(torch.randn(2, 7, 64), cache=cache).shape, cache.length)
    torch.Size([2, 7, 64]) 7

    A token becomes c = norm(W_d x), `latent` wide, and a rotated key of `rotary_dim` that all heads share. Keys of
    `head_dim` and values of `value_dim` (default: head_dim) are W_u c. `query_latent` is the width of a vector that
    queries come from in the same way; by default they come from x. For few queries behind a cache W_u is moved to the
    queries and to the output, so that the cache is read as it is: keys and values are then c for one key head.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        latent: int,
        head_dim: int,
        rotary_dim: int,
        value_dim: int | None = None,
        query_latent: int | None = None,
        mask: Mask | None = None,
        base: float = 10_000.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.latent, self.head_dim = dim, heads, latent, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        for name in ("dim", "heads", "latent", "head_dim", "value_dim"):
            check_int(name, getattr(self, name), least=1)
        self.rotary = Rotary(rotary_dim, base=base)
        self.query_down = None if query_latent is None else nn.Linear(dim, query_latent, bias=False)
        self.query_norm = None if query_latent is None else RMSNorm(query_latent)
        self.query = nn.Linear(query_latent or dim, heads * (head_dim + rotary_dim), bias=False)
        self.down = nn.Linear(dim, latent + rotary_dim, bias=False)
        self.norm = RMSNorm(latent)
        self.up = nn.Linear(latent, heads * (head_dim + self.value_dim), bias=False)
        self.out = nn.Linear(heads * self.value_dim, dim, bias=False)
        self.mask = mask
        self.core = Core(dropout=dropout)
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)

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
        n, (past, before) = x.shape[1], (0, 0) if cache is None else (cache.kept, cache.length)
        padding = None if keep is None else padding_of_last_keys(keep, past + n, before + n)
        mask = padding if self.mask is None else self.mask if padding is None else self.mask & padding
        positions = torch.arange(before, before + n, device=x.device) if positions is None else positions
        rotary_dim = self.rotary.width

        short = (
            x if self.query_down is None or self.query_norm is None else self.query_norm(project(self.query_down, x))
        )
        q = project(self.query, short).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, turned = q.split((self.head_dim, rotary_dim), -1)
        c, shared = project(self.down, x)[:, None].split((self.latent, rotary_dim), -1)  # b 1 j latent, b 1 j rotary
        angles = self.rotary.angles(shared, positions)
        turned, shared, c = self.rotary.rotate(turned, *angles), self.rotary.rotate(shared, *angles), self.norm(c)
        if cache is not None:
            shared, c = cache.append(shared, c)

        up = self.up.weight.unflatten(0, (self.heads, -1)).split((self.head_dim, self.value_dim), 1)  # h d latent
        up_keys, up_values = (part.to(x.dtype) for part in up)
        if cache is not None and self._is_cheaper_absorbed(n):
            q = torch.cat((torch.einsum("b h i d, h d l -> b h i l", q, up_keys), turned), -1)
            scale = (self.head_dim + rotary_dim) ** -0.5
            heads = self.core(q, torch.cat((c, shared), -1), c, score=Dot(scale=scale), mask=mask)
            heads = torch.einsum("b h i l, h e l -> b h i e", heads, up_values)
        else:
            k = torch.einsum("b j l, h d l -> b h j d", c[:, 0], up_keys)
            v = torch.einsum("b j l, h e l -> b h j e", c[:, 0], up_values)
            k = torch.cat((k, shared.expand(-1, self.heads, -1, -1)), -1)
            heads = self.core(torch.cat((q, turned), -1), k, v, mask=mask)
        return project(self.out, heads.transpose(1, 2).flatten(2))

    def _is_cheaper_absorbed(self, queries: int) -> bool:
        """True if attending to the latent vectors costs less than making keys and values of them."""
        widths = self.head_dim + self.value_dim
        return queries * (2 * self.latent - widths) < self.latent * widths

    def new_cache(self) -> KVCache:
        """Return an empty cache; its keys are the shared rotated keys, its values the latent vectors."""
        return KVCache()

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}, latent={self.latent}, mask={self.mask!r}"
