"""Best answer spans, from the logits of start and end."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import check_int
from ..ops.torch_state import is_traced


def best_spans(
    start: Float[Tensor, "b n"],
    end: Float[Tensor, "b n"],
    *,
    among: Bool[Tensor, "b n"] | None = None,
    longest: int | None = None,
) -> Int[Tensor, "b 2"]:
    """Return first and last token of the span with the largest start + end logit, within `among` and `longest` tokens.

    >>> best_spans(torch.tensor([[0.0, 1, 3]]), torch.tensor([[0.0, 2, 0]]), longest=2).tolist()
    [[1, 1]]
    """
    scores = _scores(start, end, among, longest).flatten(1)
    if not is_traced() and (none := (scores == -torch.inf).all(1)).any():
        raise ValueError(
            f"every row must have a possible span, got none in row {int(none.int().argmax())}: among or logits of -inf "
            "exclude all; drop such rows, or use top_spans, which returns -inf for them"
        )
    best = scores.argmax(1)
    return torch.stack((best // start.shape[1], best % start.shape[1]), 1)


def top_spans(
    start: Float[Tensor, "b n"],
    end: Float[Tensor, "b n"],
    *,
    k: int,
    among: Bool[Tensor, "b n"] | None = None,
    longest: int | None = None,
) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k 2"]]:
    """Return the k best spans, best first: logits, -inf beyond the possible spans, and first and last tokens.

    >>> scores, spans = top_spans(torch.tensor([[0.0, 1, 3]]), torch.tensor([[0.0, 2, 0]]), k=2)
    >>> scores.tolist(), spans.tolist()
    ([[3.0, 3.0]], [[[1, 1], [2, 2]]])
    """
    check_int("k", k, least=1)
    scores = _scores(start, end, among, longest).flatten(1)
    if k > scores.shape[1]:
        scores = torch.nn.functional.pad(scores, (0, k - scores.shape[1]), value=-torch.inf)
    values, best = scores.topk(k)
    n = max(start.shape[1], 1)
    return values, torch.stack((best // n, best % n), 2)


def _scores(start: Tensor, end: Tensor, among: Tensor | None, longest: int | None) -> Float[Tensor, "b n n"]:
    n = start.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool, device=start.device).triu()
    if longest is not None:
        check_int("longest", longest, least=1)
        allowed = allowed.tril(longest - 1)
    if among is not None:
        allowed = allowed & among[:, :, None] & among[:, None, :]
    return (start[:, :, None] + end[:, None, :]).masked_fill(~allowed, -torch.inf)
