"""Greedy search: the most probable token at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .constraints import Limits
from .frontier import Frontier
from .hypothesis import Hypothesis
from .prefix import Tokens
from .stepper import Stepper


@torch.no_grad()
def greedy(
    stepper: Stepper,
    source: Any,
    prefix: Tokens,
    *,
    end: int | Sequence[int] | None,
    max_length: int,
    min_length: int = 0,
    no_repeat: int | None = None,
    forbid: Sequence[int] = (),
) -> list[Hypothesis]:
    """Choose the most probable token at every step; return one hypothesis for each row of the source.

    >>> import torch
    >>> from regard.decode import greedy
    >>> class Counter:  # after n comes n + 1
    ...     def start(self, source): return self
    ...     def step(self, tokens, state): return torch.eye(10)[tokens + 1] * 9, self
    ...     def select(self, rows): return self
    >>> greedy(Counter(), None, [[0], [5]], end=8, max_length=5)[1].tokens
    (6, 7, 8)

    The prefix holds the tokens of each row before its first choice: the start token, and any forced tokens after it. At
    most `max_length` tokens are chosen, the end included, and at least `min_length` before an end. No n-gram of
    `no_repeat` tokens occurs twice, the prefix included, and no token of `forbid` is chosen. If `no_repeat` leaves only
    the end, the end is chosen even before `min_length`. Finished rows are no longer computed.
    """
    limits = Limits.of(end=end, max_length=max_length, min_length=min_length, no_repeat=no_repeat, forbid=forbid)
    return follow_one_path(Frontier(stepper, source, prefix, limits), lambda logits, _: logits.max(-1).indices)


def follow_one_path(frontier: Frontier, pick: Callable[[Tensor, Frontier], Tensor]) -> list[Hypothesis]:
    """Extend every row by the token that `pick(logits, frontier)` returns, until all are finished."""
    closed: list[tuple[Tensor, Tensor, Tensor]] = []
    while len(frontier.sentences):
        logits, total = frontier.read()
        tokens = pick(logits, frontier)
        gains = (logits.gather(1, tokens[:, None])[:, 0] - total).double()
        rows = torch.arange(len(tokens), device=tokens.device)
        over = frontier.choose(rows, tokens, gains)
        lost = ~(gains > -math.inf)
        if bool((lost | over).any()):  # the only wait for the device in a step
            if bool(lost.any()):
                raise frontier.dead_end(rows[lost][0], gains[lost][0])
            closed.append((frontier.sentences[over], rows[over], torch.full_like(rows[over], frontier.step - 1)))
            rows = rows[~over]
        frontier.keep(rows)
    if not closed:
        return []
    sentences, candidates, steps = (torch.cat(part) for part in zip(*closed, strict=True))
    order = sentences.argsort()
    return frontier.hypotheses(sentences[order], candidates[order], steps[order])
