"""Beam search: the best few hypotheses, extended side by side until none can overtake those that are over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_int
from .constraints import Limits
from .frontier import Frontier
from .hypothesis import Hypothesis
from .penalties import CoveragePenalty, LengthDivisors
from .prefix import Tokens
from .stepper import Stepper
from .topk import top


@torch.no_grad()
def beam(
    stepper: Stepper,
    source: Any,
    prefix: Tokens,
    *,
    width: int,
    end: int | Sequence[int] | None,
    max_length: int,
    min_length: int = 0,
    n_best: int = 1,
    length: Callable[[int], float] | None = None,
    coverage: CoveragePenalty | None = None,
    no_repeat: int | None = None,
    forbid: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses found for each row of the source, best first (fewer if fewer exist).

    A hypothesis of n tokens scores log p / length(n) + coverage: `length=Gnmt(0.6)` and `Coverage(0.2, name)` are
    those of Wu et al. 2016, equation 14; any function of n will do, `float` for the mean, None for the sum. Prefix
    and limits are those of `greedy`, which is what a width of 1 comes to: with `no_repeat`, one of fewer than
    `min_length` tokens comes where nothing but the end is left. One cut off at `max_length` competes like one that
    ended. A function of your own is asked for every n up to `max_length` before the search.

    At each step the `width` best continuations count: those that end join the n best found so far, and the best
    others take their place in the beam. A row of the source is over when its n-th best found scores at least

        log p of the best live hypothesis / max length(m) over the lengths m it may still reach

    which bounds whatever can come of it, as probabilities only fall and coverage is at most 0. So the search never
    stops because a hypothesis merely ended, and asking for fewer never changes the best. It is still a beam: a path
    that falls out of the `width` best, be it the greedy one, is not followed. Where nothing may follow a hypothesis it
    is dropped; a row of which nothing is left is an error.
    """
    limits = Limits.of(end=end, max_length=max_length, min_length=min_length, no_repeat=no_repeat, forbid=forbid)
    check_int("width", width, least=1)
    check_int("n_best", n_best, least=1)
    if n_best > width:
        raise ValueError(f"n_best must be at most width, got n_best={n_best} and width={width}")
    frontier = Frontier(stepper, source, prefix, limits)
    rows = frontier.sentences
    divisors = LengthDivisors(length, max_length, rows.device)
    # As many spare candidates as could end, so that a full beam goes on. A beam of one has no one to stand in.
    spare = width * len(limits.ends) if width > 1 else 0
    pool = FinishedHypotheses(len(rows), n_best, rows.device)
    totals = torch.zeros(len(rows), 1, dtype=torch.float64, device=rows.device)  # sentences lanes
    covered = torch.zeros(len(rows), 1, dtype=torch.float64, device=rows.device)  # rows source
    while totals.numel():
        logits, total = frontier.read()
        scores, parents, tokens, gains = _best(logits, total, totals, width + spare)
        over = frontier.choose(parents.flatten(), tokens.flatten(), gains.flatten()).view_as(scores)
        ids = torch.arange(scores.numel(), device=rows.device).view_as(scores)

        n = frontier.lengths.view(len(scores), -1)[:, 0].clamp(min=0)
        divisors.extend(frontier.step + 1)
        if coverage is not None:
            given = frontier.lengths < 1  # what a row is given covers nothing, however the rows beside it begin
            covered = covered + coverage.received(frontier.attention).masked_fill(given[:, None], 0.0)
        if bool((ending := over[:, :width]).any()):
            final = scores[:, :width] / divisors.at(n)[:, None]
            if coverage is not None:
                final = final + coverage(covered, frontier.sentences)[parents[:, :width]]
            pool.add(final.masked_fill(~ending, -math.inf), ids[:, :width], frontier.step - 1)

        totals, places = scores.masked_fill(over, -math.inf).topk(min(width, scores.shape[1]))
        # What is impossible takes part as a copy of the best, so that no model has to go on from where nothing can.
        kept = ids.gather(1, places)
        kept = torch.where(totals > -math.inf, kept, kept[:, :1])
        live = pool.worst < totals[:, 0] / divisors.most(n + 1)
        if not bool(live.all()):
            left = torch.maximum(pool.best, totals[:, 0])  # NaN where either is
            if bool((lost := ~live & ~(left > -math.inf)).any()):
                raise frontier.dead_end(parents[lost][0, 0], left[lost][0])
            pool.close(live, frontier.sentences[parents[:, 0]])
            totals, kept = totals[live], kept[live]
        if coverage is not None:
            covered = covered[parents.flatten()[kept.flatten()]]
        frontier.keep(kept.flatten())
    return pool.hypotheses(frontier)


class FinishedHypotheses:
    """The n best hypotheses that are over, for each sentence still searched; best first."""

    def __init__(self, sentences: int, n: int, device: torch.device) -> None:
        self._scores = torch.full((sentences, n), -math.inf, dtype=torch.float64, device=device)
        self._steps = torch.zeros(sentences, n, dtype=torch.long, device=device)
        self._candidates = torch.zeros(sentences, n, dtype=torch.long, device=device)
        self._closed: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sentences = sentences

    @property
    def best(self) -> Tensor:
        """The score of the best of each sentence, -inf until there is one."""
        return self._scores[:, 0]

    @property
    def worst(self) -> Tensor:
        """The score of the n-th best of each sentence, -inf until there are n."""
        return self._scores[:, -1]

    def add(self, scores: Tensor, candidates: Tensor, step: int) -> None:
        """Offer candidates of one step, -inf for those that are not over."""
        n = self._scores.shape[1]
        self._scores, best = torch.cat([self._scores, scores], 1).topk(n)
        self._steps = torch.cat([self._steps, torch.full_like(candidates, step)], 1).gather(1, best)
        self._candidates = torch.cat([self._candidates, candidates], 1).gather(1, best)

    def close(self, live: Tensor, sentences: Tensor) -> None:
        """Put aside the sentences that are not live any more."""
        columns = (sentences[:, None].expand_as(self._scores), self._scores, self._steps, self._candidates)
        found = ~live[:, None] & (self._scores > -math.inf)
        self._closed.append(tuple(x[found] for x in columns))  # type: ignore[arg-type]
        self._scores, self._steps, self._candidates = self._scores[live], self._steps[live], self._candidates[live]

    def hypotheses(self, frontier: Frontier) -> list[list[Hypothesis]]:
        """The n best of every sentence, in the order of the source."""
        if not self._closed:
            return []
        sentences, scores, steps, candidates = (torch.cat(part) for part in zip(*self._closed, strict=True))
        found = frontier.hypotheses(sentences, candidates, steps, scores)
        lists: list[list[Hypothesis]] = [[] for _ in range(self._sentences)]
        for sentence, hypothesis in zip(sentences.tolist(), found, strict=True):
            lists[sentence].append(hypothesis)
        return lists


def _best(logits: Tensor, total: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `count` best continuations of each sentence: log p, the row they extend, the token and its log p."""
    sentences, lanes = totals.shape
    values, tokens = top(logits, min(count, logits.shape[1]))  # a row cannot have more among the best
    gains = values.double() - total[:, None]
    choices = lanes * tokens.shape[1]
    scores, best = (totals.view(-1, 1) + gains).view(sentences, choices).topk(min(count, choices))
    best = best + torch.arange(0, sentences * choices, choices, device=best.device)[:, None]
    return scores, best // tokens.shape[1], tokens.flatten()[best], gains.flatten()[best]
