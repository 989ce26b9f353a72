"""Frontier: the rows a search is extending; reading and choosing, as every search does it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import check_token_ids
from .backpointers import SearchStep, Trace
from .constraints import Limits
from .hypothesis import Hypothesis
from .prefix import TargetPrefix, Tokens
from .stepper import Stepper, advance, attention_of


class Frontier:
    """The rows a search is extending: `read` gives what may follow each, `choose` records, `keep` moves on.

    `sentences` says which row of the source each belongs to, `lengths` how many tokens it has chosen.
    """

    def __init__(self, stepper: Stepper, source: Any, prefix: Tokens, limits: Limits) -> None:
        given = TargetPrefix.of(prefix)
        self.limits = limits
        self.trace = Trace()
        self.attention: dict[str, Tensor] = {}
        self._stepper = stepper
        self._state: Any = given.begin(stepper, source) if len(given.common) else None
        self._tokens = given.common[:, -1]
        self._history = given.common
        self._rest, self._skip = given.rest, given.late  # of each sentence
        self._late = given.late  # of each row
        self._times, self._vocabulary = 1, 0
        self.sentences = torch.arange(len(given.common), device=given.common.device)

    @property
    def step(self) -> int:
        """How many steps have been recorded."""
        return len(self.trace.steps)

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row has chosen; below 0 while it is still being given some."""
        return self.step - self._late

    def read(self) -> tuple[Tensor, Tensor]:
        """The logits of what may follow each row, -inf for what may not, and their log-sum-exp before that."""
        logits, self._state = advance(self._stepper, self._tokens, self._state)
        self.attention = attention_of(self._state)
        if self.step == 0:
            self._check(logits)
        total = log_sum_exp(logits)
        if not self.limits.allow_all:
            logits = self.limits.allow(logits, self.lengths, self._history)
        return self._given(logits, total) if self.step < self._rest.shape[1] else (logits, total)

    def choose(self, parents: Tensor, tokens: Tensor, gains: Tensor) -> Tensor:
        """Record candidates; which of them are over, for good or for want of room."""
        over = self.limits.are_ends(tokens)
        if self.step < self._rest.shape[1]:
            over = over & (self.lengths[parents] >= 0)
        if self.step + 1 >= self.limits.max_length:
            over = over | (self.lengths[parents] + 1 >= self.limits.max_length)
        self.trace.add(SearchStep(parents, tokens, gains, self.attention))
        return over

    def keep(self, candidates: Tensor) -> None:
        """Go on from these candidates of the step just recorded."""
        if not len(candidates):
            self.sentences = candidates
            return
        step = self.trace.steps[-1]
        step.kept = candidates
        if candidates is step.parents:  # each row goes on, by itself
            rows, self._tokens = candidates, step.tokens
        else:
            rows, self._tokens = step.parents[candidates], step.tokens[candidates]
            if not torch.equal(rows, torch.arange(len(self.sentences), device=rows.device)):
                self._state = self._state.select(rows)
                self.sentences, self._late = self.sentences[rows], self._late[rows]
        if self.limits.no_repeat is not None:
            self._history = torch.cat([self._history[rows], self._tokens[:, None]], 1)

    def hypotheses(
        self, sentences: Tensor, candidates: Tensor, steps: Tensor, scores: Tensor | None = None
    ) -> list[Hypothesis]:
        """The paths to these candidates of these steps, for these rows of the source."""
        return self.trace.hypotheses(
            steps=steps, candidates=candidates, skip=self._skip[sentences], scores=scores, ends=self.limits.ends
        )

    def dead_end(self, row: Tensor, gain: Tensor) -> ValueError:
        """What to raise for a row of which nothing is left, given what its best continuation gains: -inf or NaN."""
        which = f"row {int(self.sentences[row]) // self._times}"
        if bool(gain.isnan()):
            return ValueError(
                f"step must return logits below inf, got nan or inf for {which}; look for nan in the weights and the "
                "source of the model"
            )
        if self.limits.no_repeat is not None and not self.limits.ends:
            return ValueError(
                f"no_repeat={self.limits.no_repeat} leaves no token to choose from after {self._history.shape[1]} of "
                f"a vocabulary of {self._vocabulary}; pass an end, a larger no_repeat or a smaller max_length"
            )
        return ValueError(
            f"step and limits must leave a token to choose, got none for {which} after {int(self.lengths[row]) - 1} "
            "chosen; let the stepper give some token a logit above -inf, or loosen the limits"
        )

    def repeat(self, times: int) -> None:
        """Let each row stand `times` over, every copy a sentence of its own."""
        rows = torch.arange(len(self.sentences), device=self.sentences.device).repeat_interleave(times)
        if times > 1 and len(rows):
            self._state = self._state.select(rows)
        self._tokens, self._history = self._tokens[rows], self._history[rows]
        self._rest, self._skip, self._late = self._rest[rows], self._skip[rows], self._late[rows]
        self.sentences = torch.arange(len(rows), device=rows.device)
        self._times *= times

    def _given(self, logits: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """A row that is still being given tokens has one choice, and it is certain."""
        forced = self.lengths < 0
        token = self._rest[self.sentences, self.step]
        certain = torch.full_like(logits, -math.inf).scatter_(1, token[:, None], 0.0)
        return torch.where(forced[:, None], certain, logits), torch.where(forced, 0.0, total)

    def _check(self, logits: Tensor) -> None:
        if logits.ndim != 2 or len(logits) != len(self._tokens):
            raise ValueError(
                f"step must return logits (rows, vocabulary) for {len(self._tokens)} tokens, got shape "
                f"{tuple(logits.shape)}; prefix must have a row for each row of the source"
            )
        self._vocabulary = logits.shape[1]
        check_token_ids("prefix", self._rest, self._vocabulary)
        self.limits.check(self._vocabulary)


def log_sum_exp(logits: Tensor) -> Tensor:
    """log sum_j exp(logits_j), as `logits.logsumexp(-1)`, in fewer passes over them; 0 where all are -inf.

    So what is gained by a token there is -inf, and a dead end ranks behind everything, not before it as a NaN would.
    """
    most = logits.amax(-1)
    return torch.where(most == -math.inf, 0.0, most - logits.log_softmax(-1).amax(-1))
