"""Whether a head follows positions: its weights move with the query, whatever the tokens are."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...ops.weights import Weights
from ..real_tokens import padding_queries
from .head_measures import check_queries, check_weights, row_chunks


def positional(A: Weights, *, queries: Bool[Tensor, "*b i"] | None = None) -> Float[Tensor, "*b h"]:
    """max(0, 1 - sum_i D(A_i, moved_i) / sum_i D(A_i, even_i)), D(p, q) = sum_j abs(p_j - q_j) / 2.

    `moved_i` are the weights of the query before, moved by one key: A[i - 1, j - 1]. `even_i` spreads the weight of the
    row evenly over the keys that the mask shows. The sums are over queries that count, and the query before does too.

    It is 1 if each row is the row before, moved by a token: the weights depend on i - j alone. It is 0 if rows differ
    from the row before as much as from even attention, as they do if the tokens decide, or if all look at one key.
    Even attention has 0 as well.

    >>> import torch
    >>> from regard import Alibi, Causal, weights
    >>> q, k = torch.randn(2, 1, 2, 300, 16)
    >>> q[:, 0] = 0  # the first head has a bias alone, the second has no bias
    >>> A = weights(q, k, mask=Causal(), bias=Alibi(slopes=torch.tensor([0.5, 0.0])))
    >>> [round(x, 1) for x in positional(A)[0].tolist()]
    [1.0, 0.0]
    """
    check_weights(A)
    b, h, i, j = A.call.shape
    queries = padding_queries(A) if queries is None else check_queries(queries, i)
    counts = torch.ones(b, i, dtype=torch.bool, device=A.device)
    if queries is not None:
        counts = queries.to(A.device).expand(*A.shape[:-3], i).reshape(b, i)
    pairs = (counts[:, 1:] & counts[:, :-1])[:, None]
    moved_distance = torch.zeros(b, h, dtype=A.dtype, device=A.device)
    even_distance = torch.zeros_like(moved_distance)
    with torch.no_grad():
        for rows in row_chunks(A):
            first = max(rows.start, 1)
            if first >= rows.stop:
                continue
            part = A[..., first - 1 : rows.stop, :].reshape(b, h, -1, j)
            here, above, counted = part[..., 1:, :], part[..., :-1, :], pairs[..., first - 1 : rows.stop - 1]
            inside = (here[..., 1:] - above[..., :-1]).abs().sum(-1)
            moved = inside + here[..., 0].abs() + above[..., -1].abs()  # entries outside the matrix count as 0
            even = (here - _even(A, slice(first, rows.stop), here)).abs().sum(-1)
            moved_distance += (moved * counted).sum(-1)
            even_distance += (even * counted).sum(-1)
    # Rounding leaves even attention a small distance from even.
    is_even = even_distance <= pairs.sum(-1) * torch.finfo(A.dtype).eps * 16
    ratio = moved_distance / torch.where(is_even, 1.0, even_distance)
    return torch.where(is_even, 0.0, (1 - ratio).clamp(min=0)).view(*A.shape[:-2])


def _even(A: Weights, rows: slice, weights: Tensor) -> Tensor:
    """Return the sum of each row of `weights`, spread evenly over the keys that the mask shows."""
    mask = A.call.mask
    if mask is None:
        return weights.mean(-1, keepdim=True).expand_as(weights)
    visible = mask.over(replace(A.call.whole(), rows=rows))
    visible = visible[(None,) * (4 - visible.ndim)].expand_as(weights)
    return visible * weights.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
