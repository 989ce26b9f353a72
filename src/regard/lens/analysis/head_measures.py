"""One number per head: where its attention falls, which tokens it copies, which other head it resembles.

Each function takes a `Weights` and returns a number for each batch row and head, `b h`: the mean over queries, in
memory linear in the sequence. `queries`, a bool tensor `(i,)` or `(b, i)`, selects the queries that count. By default
those are the real tokens of each text, as the mask shows them (`real_tokens.py`): a text in a padded batch has the
numbers that it has alone. For a cross-attention pass `tape.real_queries(layer)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...checks import check_integer_tensor, check_number, check_tensor
from ...ops.blocks.prepared_call import PreparedCall
from ...ops.blocks.reduction import Reduction
from ...ops.shape import Sizes
from ...ops.terms.coordinates import Block
from ...ops.terms.masks import Causal, Diagonal, Documents, Window
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.weights import Weights
from ..real_tokens import find_real_keys, padding_queries, real_tokens, received_from, without_queries

CHUNK_ENTRIES = 2**21  # matrix elements in memory at a time


def share(A: Weights, mask: Mask, *, queries: Bool[Tensor, "*b i"] | None = None) -> Float[Tensor, "*b h"]:
    """mean_i sum_j A_ij mask_ij: the share of attention that falls where a mask is True.

    >>> import torch
    >>> from regard import Causal, Window, weights
    >>> q, k = torch.randn(2, 1, 4, 300, 16)
    >>> A = weights(q, k, mask=Causal())
    >>> share(A, Window(8)).shape, round(share(A, Causal())[0, 0].item(), 3)
    (torch.Size([1, 4]), 1.0)

    Masks to try: `Window(8)` for how local a head is, `Diagonal()` for attention to the query itself, `Prefix(1)` for
    attention to the first token, `Dense(same_sentence)` for any set of pairs.
    """
    check_weights(A)
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask term, got {type(mask).__name__}; write Window(8), or Dense(x)")
    call = A.call
    b, h, i, j = call.shape
    mask.check(Sizes(b, h, call.k.shape[1], i, j, call.q.shape[3], call.k.shape[3], readable=True))
    mask = mask.map_tensors(lambda x: x.to(A.device))

    def value(prepared: PreparedCall, block: Block, part: Tensor, x: Tensor | None) -> Tensor:
        # If batch rows or heads were selected, the mask counts them as they are numbered after the selection.
        return (part * mask.over(replace(block, batch_ids=None, head_ids=None))).sum(-1)

    return _mean(A, A.reduce(Reduction(value, "rows")), queries)


def locality(A: Weights, width: int, *, queries: Bool[Tensor, "*b i"] | None = None) -> Float[Tensor, "*b h"]:
    """Attention to keys with abs(i - j) < width: `share(A, Window(width))`."""
    return share(A, Window(width), queries=queries)


def previous_token(A: Weights, *, queries: Bool[Tensor, "*b i"] | None = None) -> Float[Tensor, "*b h"]:
    """mean_i A[i, i - 1]: attention to the previous token."""
    return share(A, Window(before=1, after=0) & ~Diagonal(), queries=queries)


def duplicate_token(
    A: Weights, tokens: Int[Tensor, "*b n"], *, queries: Bool[Tensor, "*b i"] | None = None
) -> Float[Tensor, "*b h"]:
    """Attention to earlier occurrences of the query's own token; `tokens` are the ids of the keys."""
    tokens = _key_ids(A, tokens)
    return share(A, Documents(_query_ids(A, tokens), tokens) & Causal() & ~Diagonal(), queries=queries)


def induction(
    A: Weights, tokens: Int[Tensor, "*b n"], *, queries: Bool[Tensor, "*b i"] | None = None
) -> Float[Tensor, "*b h"]:
    """Attention to tokens that follow an earlier occurrence of the query's own token (Olsson et al. 2022).

    In "A B ... A" the second A attends to B. A head that does so on repeated random tokens can copy in context.
    """
    tokens = _key_ids(A, tokens)
    no_token = tokens[..., :1] * 0 + tokens.min() - 1 if tokens.numel() else tokens  # an id that no token has
    previous = torch.cat([no_token, tokens[..., :-1]], -1)
    if (
        real := find_real_keys(A.call)
    ) is not None:  # the first token of a text on the right of its padding follows none
        real = real.view(*A.shape[:-3], -1)
        previous = torch.where(torch.cat([real[..., :1], real[..., :-1]], -1), previous, no_token)
    return share(A, Documents(_query_ids(A, tokens), previous) & Causal(), queries=queries)


def retrieval(
    A: Weights, tokens: Int[Tensor, "*b n"], *, queries: Bool[Tensor, "*b i"] | None = None
) -> Float[Tensor, "*b h"]:
    """Attention to earlier occurrences of the token that comes after the query: the token that is copied next.

    In "A B ... C" before another B, the query C attends to B. Heads that do so carry what a model copies from its
    context (Wu et al. 2024). Pass the queries before a copy as `queries`: the others have no token to copy.
    """
    tokens = _key_ids(A, tokens)
    no_token = tokens[..., :1] * 0 + tokens.min() - 1 if tokens.numel() else tokens
    following = torch.cat([tokens[..., 1:], no_token], -1)
    return share(A, Documents(_query_ids(A, following), tokens) & Causal() & ~Diagonal(), queries=queries)


def diagonality(A: Weights, *, queries: Bool[Tensor, "*b i"] | None = None) -> Float[Tensor, "*b h"]:
    """mean_i sum_j A_ij (1 - abs(c_i - j) / (n_j - 1)), c_i the line from the first query that counts and the first
    real key to the last of both.

    It is 1 for a head on that line and falls with the distance from it: the area under the curve of mass within each
    distance, the cumulative attention diagonality of Shim et al. 2022, extended to unequal lengths (speech, alignment).
    """
    check_weights(A)
    real = real_tokens(A)
    counted = real.queries
    if queries is not None:
        counted = check_queries(queries, A.shape[-2]).to(A.device).expand(*A.shape[:-3], -1).flatten(0, -2)
    top, rows = _extent(counted)
    left, cols = _extent(real.keys)
    slope, max_distance = (cols - 1).to(A.dtype) / (rows - 1).clamp(min=1), (cols - 1).clamp(min=1)

    def value(prepared: PreparedCall, block: Block, part: Tensor, x: Tensor | None) -> Tensor:
        b = replace(block, batch_ids=None).b  # the numbers after a selection
        row = replace(block, row_ids=None).row
        line = left[b] + (row - top[b]) * slope[b]
        return (part * (1 - (line - block.j).abs() / max_distance[b])).sum(-1)

    return _mean(A, A.reduce(Reduction(value, "rows")), queries)


class Sinks(NamedTuple):
    """Whether each key is a sink, `b h j`, and the share of attention that sinks receive, `b h`."""

    keys: Tensor
    share: Tensor


def sinks(A: Weights, *, threshold: float = 0.3, queries: Bool[Tensor, "*b i"] | None = None) -> Sinks:
    """Attention sinks: keys that receive more than `threshold` of the mean query's attention (0.3 in Gu et al. 2025).

    >>> import torch
    >>> from regard import weights
    >>> q, k = torch.ones(1, 1, 50, 4), torch.zeros(1, 1, 50, 4)
    >>> k[0, 0, 0] = 4.0  # every query attends to the first token
    >>> result = sinks(weights(q, k))
    >>> result.keys.nonzero().tolist(), round(result.share.item(), 2)
    ([[0, 0, 0]], 0.98)
    """
    check_weights(A)
    check_number("threshold", threshold)
    queries = padding_queries(A) if queries is None else check_queries(queries, A.shape[-2]).to(A.device)
    counts = A.shape[-2] if queries is None else queries.sum(-1)[..., None, None]
    mean = received_from(A, queries) / torch.as_tensor(counts, device=A.device).clamp(min=1)
    keys = mean > threshold
    return Sinks(keys, torch.where(keys, mean, 0.0).sum(-1))


def similarity(A: Weights, B: Weights | None = None) -> Float[Tensor, "*b h h2"]:
    """<A_h, B_h2> / (|A_h| |B_h2|): the cosine similarity of each pair of heads of A and B; B is A by default. Rows of
    padding queries are left out.

    >>> import torch
    >>> from regard import weights
    >>> q, k = torch.randn(2, 1, 4, 100, 16)
    >>> similarity(weights(q, k)).diagonal(dim1=-2, dim2=-1)
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]])
    """
    B = A if B is None else B
    check_weights(A)
    check_weights(B, "B")
    if A.shape[:-3] != B.shape[:-3] or A.shape[-2:] != B.shape[-2:]:
        raise ValueError(
            f"A and B must share batch, queries and keys, got shapes {tuple(A.shape)} and {tuple(B.shape)}; "
            "compare layers over the same tokens"
        )
    is_one = B is A
    for queries in [padding_queries(X) for X in ((A,) if is_one else (A, B))]:
        if queries is not None:
            A = without_queries(A, queries)
            B = A if is_one else without_queries(B, queries)
    dtype = torch.promote_types(A.dtype, B.dtype)
    inner = torch.zeros(*A.shape[:-2], B.shape[-3], dtype=dtype, device=A.device)
    squares = [torch.zeros(X.shape[:-2], dtype=dtype, device=A.device) for X in (A, B)]
    with torch.no_grad():
        for rows in row_chunks(A):
            ours = A[..., rows, :].flatten(-2).to(dtype)
            theirs = ours if B is A else B[..., rows, :].flatten(-2).to(dtype)
            inner += ours @ theirs.mT
            for square, part in zip(squares, (ours, theirs), strict=True):
                square += part.square().sum(-1)
    lengths = squares[0].sqrt()[..., :, None] * squares[1].sqrt()[..., None, :]
    return torch.where(lengths > 0, inner / torch.where(lengths > 0, lengths, 1.0), 0.0)


def check_weights(A: object, name: str = "A") -> Weights:
    """Return A; raise unless it is the `Weights` of one layer, rather than a tape or `Reduced` measures."""
    if not isinstance(A, Weights):
        raise TypeError(
            f"{name} must be the Weights of one layer, got {type(A).__name__}; for a tape "
            "pass tape[0], or loop over tape.values(), captured without keep="
        )
    return A


def row_chunks(A: Weights) -> Iterator[slice]:
    """Yield slices of rows from top to bottom, small enough to hold `A[..., rows, :]` in memory."""
    *lead, i, j = A.shape
    step = max(1, CHUNK_ENTRIES // max(1, torch.Size(lead).numel() * j))
    return (slice(start, min(start + step, i)) for start in range(0, i, step))


def _key_ids(A: Weights, tokens: Tensor) -> Tensor:
    """Return the token ids of the keys, checked."""
    check_weights(A)
    check_tensor("tokens", tokens)
    check_integer_tensor("tokens", tokens, 1, 2)
    if tokens.shape[-1] != A.shape[-1]:
        raise ValueError(f"tokens must hold one id for each of the {A.shape[-1]} keys, got shape {tuple(tokens.shape)}")
    return tokens.to(A.device).long()


def _query_ids(A: Weights, tokens: Tensor) -> Tensor:
    """Return the ids of the queries, which are tokens among the keys."""
    first, (*_, i, j) = A.call.first_position, A.shape
    if not 0 <= first <= j - i:
        raise ValueError(
            f"queries must be among the tokens of the keys, got {i} queries from position {first} and {j} keys; "
            "token measures are for self-attention"
        )
    return tokens[..., first : first + i]


def _mean(A: Weights, per_query: Tensor, queries: Tensor | None) -> Tensor:
    """Average `b h i` to `b h` over the queries that count; if None, over those that are real tokens."""
    queries = padding_queries(A) if queries is None else queries
    if queries is None:
        return per_query.sum(-1) / max(per_query.shape[-1], 1)
    counts = check_queries(queries, per_query.shape[-1]).to(per_query.device)
    total = torch.where(counts[..., None, :], per_query, 0.0).sum(-1)
    return total / counts.sum(-1).clamp(min=1)[..., None]


def _extent(counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position that counts in each row of `b n`, and the number from there to the last: `b`."""
    n = counted.shape[-1]
    position = torch.arange(n, device=counted.device)
    first = torch.where(counted, position, n).amin(-1) if n else counted.sum(-1)
    last = torch.where(counted, position, -1).amax(-1) if n else counted.sum(-1)
    return first, last - first + 1


def check_queries(queries: Tensor, n: int) -> Tensor:
    """Return `queries`; raise unless it is a bool tensor with one entry per query."""
    check_tensor("queries", queries)
    if queries.dtype != torch.bool or queries.shape[-1:] != (n,):
        raise ValueError(
            f"queries must be bool with one entry for each of the {n} queries, True for those to average, "
            f"got {queries.dtype} of shape {tuple(queries.shape)}"
        )
    return queries
