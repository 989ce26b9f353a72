"""Sampling: random tokens, each row from a random stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_int, check_number
from .constraints import Limits
from .frontier import Frontier
from .greedy import follow_one_path
from .hypothesis import Hypothesis
from .prefix import Tokens
from .stepper import Stepper
from .topk import blockwise_topk

SEEDS = 2**64  # number of seeds; after the last comes 0


@torch.no_grad()
def sample(
    stepper: Stepper,
    source: Any,
    prefix: Tokens,
    *,
    end: int | Sequence[int] | None,
    max_length: int,
    seed: int | Sequence[int],
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_length: int = 0,
    no_repeat: int | None = None,
    forbid: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Draw tokens from softmax(logits / temperature); return `samples` hypotheses for each row of the source.

    `top_k` keeps the k most probable tokens, `top_p` the most probable ones that together reach p (Holtzman et al.
    2020); with both, `top_p` applies to the k tokens. The global random state is neither read nor changed: the n-th
    hypothesis draws from a generator seeded with `seed + n`, so it does not depend on other rows. A list of seeds, one
    for each row, makes rows independent of their place too: the k-th sample of row r draws from `seed[r] + k`. Prefix
    and limits are those of `greedy`. Scores are log-probabilities of the model at temperature 1 and over all tokens.
    """
    limits = Limits.of(end=end, max_length=max_length, min_length=min_length, no_repeat=no_repeat, forbid=forbid)
    check_int("samples", samples, least=1)
    for one in seed if isinstance(seed, Sequence) else [seed]:
        check_int("seed", one, below=SEEDS)
    check_number("temperature", temperature)
    if temperature <= 0:
        raise ValueError(
            f"temperature must be above 0, got {temperature}; for the most probable tokens use greedy(...)"
        )
    check_top_k_and_top_p(top_k, top_p)
    frontier = Frontier(stepper, source, prefix, limits)
    rows = len(frontier.sentences)
    frontier.repeat(samples)
    if not isinstance(seed, Sequence):
        seeds: Sequence[int] = range(seed, seed + rows * samples)
    elif len(seed) != rows:
        raise ValueError(f"seed must be one number or a list of {rows}, one for each row, got {len(seed)}")
    else:
        seeds = [first + k for first in seed for k in range(samples)]
    streams = uniform_streams(seeds, max_length).to(frontier.sentences.device)

    def pick(logits: Tensor, frontier: Frontier) -> Tensor:
        u = streams[frontier.sentences, frontier.lengths.clamp(min=0)]
        return draw_tokens(logits, u, temperature=temperature, top_k=top_k, top_p=top_p)

    hypotheses = follow_one_path(frontier, pick)
    return [hypotheses[first : first + samples] for first in range(0, len(hypotheses), samples)]


def check_top_k_and_top_p(top_k: int | None, top_p: float | None) -> None:
    """Raise unless `top_k` and `top_p` keep at least one token."""
    if top_k is not None:
        check_int("top_k", top_k, least=1)
    if top_p is not None:
        check_number("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def draw_tokens(
    logits: Tensor, u: Tensor, *, temperature: float = 1.0, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return for each row the token at which the cumulative probability passes the fraction `u` of the kept total."""
    tokens = None
    if top_k is not None and top_k < logits.shape[1]:
        logits, tokens = blockwise_topk(logits, top_k)
    elif top_p is not None:
        logits, tokens = logits.sort(descending=True, stable=True)
    logits = logits.double()
    # The largest logit becomes 0, so that with a small temperature the others become -inf and not the largest inf.
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p is not None:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    cumulative = p.cumsum(-1)
    at = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    at = at.clamp(max=p.shape[1] - 1)  # a row of NaN has no such index; its log-probability shows the NaN
    return (at if tokens is None else tokens.gather(1, at))[:, 0]


def uniform_streams(seeds: Sequence[int], steps: int) -> Tensor:
    """Return random numbers in [0, 1), each row from its own generator with its seed."""
    streams = [
        torch.rand(steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed % SEEDS)) for seed in seeds
    ]
    # Clamped below 1 so that a product with the total cannot round up to the total.
    return torch.stack(streams).clamp(max=1 - 1e-12) if streams else torch.empty(0, steps, dtype=torch.float64)
