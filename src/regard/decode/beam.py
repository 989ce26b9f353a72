"""Beam search: extend the best hypotheses together until none can overtake those that are finished."""

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
from .topk import blockwise_topk


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
    """Return the `n_best` best hypotheses found for each row of the source, best first (fewer if fewer exist).

    A hypothesis of n tokens scores log p / length(n) + coverage: `length=Gnmt(0.6)` and `Coverage(0.2, name)` are
    those of Wu et al. 2016, equation 14. `length` may be any function of n: `float` gives the mean, None the sum. A
    function other than `Gnmt` is evaluated for every n up to `max_length` before the search. Prefix and limits are
    those of `greedy`, which a width of 1 is equal to: with `no_repeat`, a hypothesis may be shorter than `min_length`
    if only the end is left to choose. A hypothesis cut off at `max_length` competes like one that ended.

    Each step takes the `width` best continuations: those that end join the n best finished ones, and the next best
    fill the beam. A row of the source is finished when its n-th best finished hypothesis scores at least

        log p of the best live hypothesis / max length(m) over the lengths m it may still reach

    which bounds the score of every continuation, since probabilities only fall and coverage is at most 0. So the
    search does not stop just because a hypothesis ended, and a smaller `n_best` never changes the best. It is still a
    beam: a path that falls out of the `width` best is not followed, even the greedy one. A hypothesis without a
    possible continuation is dropped; a row without any hypothesis raises.
    """
    limits = Limits.of(end=end, max_length=max_length, min_length=min_length, no_repeat=no_repeat, forbid=forbid)
    check_int("width", width, least=1)
    check_int("n_best", n_best, least=1)
    if n_best > width:
        raise ValueError(f"n_best must be at most width, got n_best={n_best} and width={width}")
    frontier = Frontier(stepper, source, prefix, limits, replay_from=min(1, width - 1))
    rows = frontier.sentences
    divisors = LengthDivisors(length, max_length, rows.device)
    # Spare candidates replace those that may end, so that the beam stays full. A beam of one has none, as in `greedy`.
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
            is_prefix = frontier.lengths < 1  # attention of prefix tokens is not counted, whatever other rows do
            covered = covered + coverage.attention_received(frontier.attention).masked_fill(is_prefix[:, None], 0.0)
        ending = over[:, :width]
        if ending.is_cuda or bool(ending.any()):  # to add nothing takes a GPU less time than to wait for it
            final = scores[:, :width] / divisors.at(n)[:, None]
            if coverage is not None:
                final = final + coverage(covered, frontier.sentences)[parents[:, :width]]
            pool.add(final.masked_fill(~ending, -math.inf), ids[:, :width], frontier.step - 1)

        totals, places = scores.masked_fill(over, -math.inf).topk(min(width, scores.shape[1]))
        # Impossible candidates are replaced by a copy of the best one, so that the model steps from possible ones only.
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
    """The n best finished hypotheses of each sentence that is still searched, best first."""

    def __init__(self, sentences: int, n: int, device: torch.device) -> None:
        self._scores = torch.full((sentences, n), -math.inf, dtype=torch.float64, device=device)
        self._steps = torch.zeros(sentences, n, dtype=torch.long, device=device)
        self._candidates = torch.zeros(sentences, n, dtype=torch.long, device=device)
        self._closed: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sentences = sentences

    @property
    def best(self) -> Tensor:
        """Score of the best hypothesis of each sentence, -inf until there is one."""
        return self._scores[:, 0]

    @property
    def worst(self) -> Tensor:
        """Score of the n-th best hypothesis of each sentence, -inf until there are n."""
        return self._scores[:, -1]

    def add(self, scores: Tensor, candidates: Tensor, step: int) -> None:
        """Add candidates of one step; a score of -inf marks those that are not finished."""
        n = self._scores.shape[1]
        self._scores, best = torch.cat([self._scores, scores], 1).topk(n)
        self._steps = torch.cat([self._steps, torch.full_like(candidates, step)], 1).gather(1, best)
        self._candidates = torch.cat([self._candidates, candidates], 1).gather(1, best)

    def close(self, live: Tensor, sentences: Tensor) -> None:
        """Store the results of the sentences that are no longer live."""
        columns = (sentences[:, None].expand_as(self._scores), self._scores, self._steps, self._candidates)
        is_final = ~live[:, None] & (self._scores > -math.inf)
        self._closed.append(tuple(x[is_final] for x in columns))  # type: ignore[arg-type]
        self._scores, self._steps, self._candidates = self._scores[live], self._steps[live], self._candidates[live]

    def hypotheses(self, frontier: Frontier) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of every sentence, in the order of the source."""
        if not self._closed:
            return []
        sentences, scores, steps, candidates = (torch.cat(part) for part in zip(*self._closed, strict=True))
        hypotheses = frontier.hypotheses(sentences, candidates, steps, scores)
        lists: list[list[Hypothesis]] = [[] for _ in range(self._sentences)]
        for sentence, hypothesis in zip(sentences.tolist(), hypotheses, strict=True):
            lists[sentence].append(hypothesis)
        return lists


def _best(logits: Tensor, total: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the `count` best continuations per sentence: log p, the row they extend, the token and its log p."""
    sentences, lanes = totals.shape
    values, tokens = blockwise_topk(logits, min(count, logits.shape[1]))  # no row contributes more than `count`
    gains = values.double() - total[:, None]
    choices = lanes * tokens.shape[1]
    scores, best = (totals.view(-1, 1) + gains).view(sentences, choices).topk(min(count, choices))
    best = best + torch.arange(0, sentences * choices, choices, device=best.device)[:, None]
    return scores, best // tokens.shape[1], tokens.flatten()[best], gains.flatten()[best]
