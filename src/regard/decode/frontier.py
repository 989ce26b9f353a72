"""Frontier: the rows that a search extends, and the reading and choosing that all searches share."""

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
from .stepper import Stepper, advance, attention_of, replay_steps


class Frontier:
    """The rows of a search: hypotheses that each step extends by one token.

    A step calls `read` for the next logits of each row, `choose` to record candidates (a row and its next token each),
    and `keep` to make some of these candidates the rows of the next step. `sentences` is the sentence that each row
    belongs to, a row of the source or a copy made by `repeat`; `lengths` is the number of tokens each row has chosen.
    Steps from `replay_from` on, 0 or 1, are replayed if the stepper can: those that have the same number of rows.
    """

    def __init__(self, stepper: Stepper, source: Any, prefix: Tokens, limits: Limits, *, replay_from: int = 0) -> None:
        given = TargetPrefix.of(prefix, stepper)
        self.limits = limits
        self.trace = Trace()
        self.attention: dict[str, Tensor] = {}
        self._stepper, self._replay_from = stepper, replay_from
        self._state: Any = None
        if len(given.common):
            given, self._state = given.begin(stepper, source)
        self._tokens = given.common[:, -1]
        self._history = given.common
        self._rest, self._skip = given.rest, given.late  # per sentence
        self._late = given.late  # per row
        self._times, self._vocabulary = 1, 0
        self.sentences = torch.arange(len(given.common), device=given.common.device)

    @property
    def step(self) -> int:
        """Number of recorded steps."""
        return len(self.trace.steps)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens each row has chosen; negative while it still reads its prefix."""
        return self.step - self._late

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the logits of each row, -inf for tokens that may not follow, and the log-sum-exp of all its logits."""
        if self._replay_from <= self.step <= 1:  # before the first step, a cache may be empty
            steps = self._rest.shape[1] + self.limits.max_length - self.step
            self._state = replay_steps(self._stepper, self._state, steps)
        logits, self._state = advance(self._stepper, self._tokens, self._state)
        self.attention = attention_of(self._state)
        if self.step == 0:
            self._check(logits)
        total = log_sum_exp(logits)
        if not self.limits.allow_all:
            logits = self.limits.allow(logits, self.lengths, self._history)
        return self._force_prefix(logits, total) if self.step < self._rest.shape[1] else (logits, total)

    def choose(self, parents: Tensor, tokens: Tensor, gains: Tensor) -> Tensor:
        """Record candidates: `tokens` after the rows `parents`, with log-probability `gains`.

        Return True for each candidate that is finished, by an end token or by `max_length`.
        """
        over = self.limits.are_ends(tokens)
        if self.step < self._rest.shape[1]:
            over = over & (self.lengths[parents] >= 0)
        if self.step + 1 >= self.limits.max_length:
            over = over | (self.lengths[parents] + 1 >= self.limits.max_length)
        self.trace.add(SearchStep(parents, tokens, gains, self.attention))
        return over

    def keep(self, candidates: Tensor) -> None:
        """Make these candidates, indices into the last recorded step, the rows of the next step."""
        if not len(candidates):
            self.sentences = candidates
            return
        step = self.trace.steps[-1]
        step.kept = candidates
        if candidates is step.parents:  # every row continues with its one candidate
            rows, self._tokens = candidates, step.tokens
        else:
            rows, self._tokens = step.parents[candidates], step.tokens[candidates]
            # On a GPU the state is copied even if the rows are in place: to compare them would wait for the device.
            if rows.is_cuda or not torch.equal(rows, torch.arange(len(self.sentences), device=rows.device)):
                self._state = self._state.select(rows)
                self.sentences, self._late = self.sentences[rows], self._late[rows]
        if self.limits.no_repeat is not None:
            self._history = torch.cat([self._history[rows], self._tokens[:, None]], 1)

    def hypotheses(
        self, sentences: Tensor, candidates: Tensor, steps: Tensor, scores: Tensor | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of `sentences[n]` that end with candidate `candidates[n]` of step `steps[n]`."""
        return self.trace.hypotheses(
            steps=steps, candidates=candidates, skip=self._skip[sentences], scores=scores, ends=self.limits.ends
        )

    def dead_end(self, row: Tensor, gain: Tensor) -> ValueError:
        """Return the error for a row without a possible continuation; `gain` is its best one, -inf or NaN."""
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
            "chosen; return a logit above -inf for some token, or loosen the limits"
        )

    def repeat(self, times: int) -> None:
        """Repeat each row `times`; every copy is a sentence of its own."""
        rows = torch.arange(len(self.sentences), device=self.sentences.device).repeat_interleave(times)
        if times > 1 and len(rows):
            self._state = self._state.select(rows)
        self._tokens, self._history = self._tokens[rows], self._history[rows]
        self._rest, self._skip, self._late = self._rest[rows], self._skip[rows], self._late[rows]
        self.sentences = torch.arange(len(rows), device=rows.device)
        self._times *= times

    def _force_prefix(self, logits: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Give a row that still reads its prefix one possible token, with probability 1."""
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
    """log sum_j exp(logits_j), as `logits.logsumexp(-1)` in fewer passes; 0 for a row of -inf alone.

    Tokens of such a row then have log-probability -inf and rank last, whereas NaN would rank first.
    """
    largest = logits.amax(-1)
    return torch.where(largest == -math.inf, 0.0, largest - logits.log_softmax(-1).amax(-1))
