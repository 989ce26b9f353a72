"""Spans: the stretch of text that answers, from the logits of where it starts and where it ends."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops.demands import must_count


def best_spans(
    start: Float[Tensor, "b n"],
    end: Float[Tensor, "b n"],
    *,
    among: Bool[Tensor, "b n"] | None = None,
    longest: int | None = None,
) -> Int[Tensor, "b 2"]:
    """First and last token of the span with the largest start + end logit, inside `among`, of at most `longest`.

    >>> best_spans(torch.tensor([[0.0, 1, 3]]), torch.tensor([[0.0, 2, 0]]), longest=2).tolist()
    [[1, 1]]
    """
    n = start.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool, device=start.device).triu()
    if longest is not None:
        must_count("longest", longest, least=1)
        allowed = allowed.tril(longest - 1)
    if among is not None:
        allowed = allowed & among[:, :, None] & among[:, None, :]
    scores = (start[:, :, None] + end[:, None, :]).masked_fill(~allowed, -torch.inf)
    best = scores.flatten(1).argmax(1)
    return torch.stack((best // n, best % n), 1)
