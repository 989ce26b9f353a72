"""Sampling: tokens drawn at random, each row from a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_int, check_number
from .constraints import Limits
from .frontier import Frontier
from .greedy import walk
from .hypothesis import Hypothesis
from .prefix import Tokens
from .stepper import Stepper
from .topk import top

SEEDS = 2**64  # the first comes behind the last


@torch.no_grad()
def sample(
    stepper: Stepper,
    source: Any,
    prefix: Tokens,
    *,
    end: int | Sequence[int] | None,
    max_length: int,
    seed: int,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_length: int = 0,
    no_repeat: int | None = None,
    forbid: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Tokens drawn from softmax(logits / temperature), `samples` hypotheses for each row of the source.

    `top_k` keeps the k likeliest tokens, `top_p` the likeliest whose probabilities reach p (Holtzman et al. 2020),
    both the one within the other. The global random state is neither read nor changed: the n-th hypothesis draws
    from a generator seeded with `seed + n`, so it does not depend on the rows beside it. Prefix and limits are those
    of `greedy`; scores are log-probabilities under the model itself, at temperature 1 and over all tokens.
    """
    limits = Limits.of(end=end, max_length=max_length, min_length=min_length, no_repeat=no_repeat, forbid=forbid)
    check_int("seed", seed, below=SEEDS)
    check_int("samples", samples, least=1)
    check_number("temperature", temperature)
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; for the likeliest tokens write greedy(...)")
    check_top_k_and_top_p(top_k, top_p)
    frontier = Frontier(stepper, source, prefix, limits)
    frontier.repeat(samples)
    streams = uniform(len(frontier.sentences), max_length, seed).to(frontier.sentences.device)

    def pick(logits: Tensor, frontier: Frontier) -> Tensor:
        u = streams[frontier.sentences, frontier.lengths.clamp(min=0)]
        return draw(logits, u, temperature=temperature, top_k=top_k, top_p=top_p)

    found = walk(frontier, pick)
    return [found[first : first + samples] for first in range(0, len(found), samples)]


def check_top_k_and_top_p(top_k: int | None, top_p: float | None) -> None:
    """Raise unless some tokens are left to draw from."""
    if top_k is not None:
        check_int("top_k", top_k, least=1)
    if top_p is not None:
        check_number("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def draw(logits: Tensor, u: Tensor, *, temperature: float = 1.0, top_k: int | None, top_p: float | None) -> Tensor:
    """The token at which the cumulative probability of each row passes the fraction `u` of what is kept."""
    tokens = None
    if top_k is not None and top_k < logits.shape[1]:
        logits, tokens = top(logits, top_k)
    elif top_p is not None:
        logits, tokens = logits.sort(descending=True, stable=True)
    logits = logits.double()
    # From the largest down, so that what a small temperature makes overflow is a probability of 0.
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p is not None:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    cumulative = p.cumsum(-1)
    at = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    at = at.clamp(max=p.shape[1] - 1)  # a row of NaN has no such place, and whoever reads what is there sees that
    return (at if tokens is None else tokens.gather(1, at))[:, 0]


def uniform(rows: int, steps: int, seed: int) -> Tensor:
    """Numbers from 0 up to but never at 1, row n from a generator of its own seeded with `seed + n`."""
    streams = [
        torch.rand(steps, dtype=torch.float64, generator=torch.Generator().manual_seed((seed + row) % SEEDS))
        for row in range(rows)
    ]
    # Kept clear of 1 so that a product with the total cannot round up to the total.
    return torch.stack(streams).clamp(max=1 - 1e-12) if rows else torch.empty(0, steps, dtype=torch.float64)
