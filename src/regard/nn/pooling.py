"""AttentionPool: one vector per sequence, or one per learned query, as a weighted mean of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..argument_hints import CALLS, LAYERS, PADDING, with_argument_hints
from ..checks import check_int
from ..ops.operator import weights
from ..ops.terms.masks import Padding
from ..ops.terms.normalizers import Normalizer
from ..ops.terms.scores import Dot, Score
from ..ops.weights import Weights
from .core import Core
from .learned_terms import fill, slot


class AttentionPool(nn.Module):
    """softmax_j(u . x_j) @ x: the tokens of a sequence, weighted by a learned query.

    Under a softmax the learned query u and a linear score w . x + c are the same thing. With `hidden`, the score has
    a hidden layer: u . tanh(W x_j + b) (Yang et al. 2016, eq. 5 to 7). With `queries=n`, there are n queries and n
    vectors (Lin et al. 2017, eq. 6, with `hidden`).

    >>> x, lengths = torch.randn(2, 7, 16), torch.tensor([7, 4])
    >>> AttentionPool(16)(x, lengths).shape, AttentionPool(16, queries=3, hidden=8)(x, lengths).shape
    (torch.Size([2, 16]), torch.Size([2, 3, 16]))
    >>> AttentionPool(16, queries=3).weights(x, lengths)
    Weights(2 x 1 x 3 x 7, score=Dot(scale=1.0), mask=Padding(int64[2]))

    With `heads`, the features of keys and tokens are split over heads, and each head pools its own part. A sequence of
    padding alone gives zeros.
    """

    @with_argument_hints(LAYERS)
    def __init__(
        self,
        dim: int,
        *,
        queries: int | None = None,
        heads: int = 1,
        hidden: int | None = None,
        score: Score | nn.Module | None = None,
        normalize: Normalizer | nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_int("heads", heads, least=1)
        if queries is not None:
            check_int("queries", queries, least=1)
        width = dim if hidden is None else hidden
        for name, size in (("dim", dim), ("hidden", width)):
            if size % heads:
                raise ValueError(f"{name} must be a multiple of heads, got {name}={size} and heads={heads}")
        self.queries = queries
        self.heads = heads
        self.key = nn.Identity() if hidden is None else nn.Sequential(nn.Linear(dim, hidden), nn.Tanh())
        self.query = nn.Parameter(torch.randn(1 if queries is None else queries, width) * width**-0.5)
        self.score = slot("score", Dot(scale=1.0) if score is None else score, Score)
        self.normalize = slot("normalize", normalize, Normalizer)
        self.core = Core()

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(
        self, x: Float[Tensor, "b n dim"], keep: Tensor | Sequence[int] | None = None
    ) -> Float[Tensor, "b *queries dim"]:
        """Return the pooled vectors; `keep` is lengths `(b,)` or keep `(b, n)`, True = a real token."""
        q, k, terms = self._inputs(x, keep)
        pooled = self.core(q, k, self._split(x), **terms).transpose(1, 2).flatten(2)  # b queries dim
        return pooled[:, 0] if self.queries is None else pooled

    @with_argument_hints(CALLS, renamed=PADDING)
    def weights(self, x: Float[Tensor, "b n dim"], keep: Tensor | Sequence[int] | None = None) -> Weights:
        """Return the lazy weights of the same call: b heads queries n."""
        q, k, terms = self._inputs(x, keep)
        return weights(q, k, **terms)

    def extra_repr(self) -> str:
        return f"queries={self.queries}, heads={self.heads}"

    def _inputs(self, x: Tensor, keep: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        k = self._split(self.key(x))
        q = self._split(self.query[None].to(k.dtype)).expand(k.shape[0], -1, -1, -1)
        mask = None if keep is None else Padding(torch.as_tensor(keep, device=x.device))
        return q, k, {"score": fill(self.score), "mask": mask, "normalize": fill(self.normalize)}

    def _split(self, x: Tensor) -> Tensor:
        """`b n (heads d) -> b heads n d`."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
