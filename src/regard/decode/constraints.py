"""Limits: which tokens may follow, and when a hypothesis is finished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_int

PAD = -1  # no token: before the first one of a row that is shorter than others


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Constraints of every search: end tokens, lengths, repeated n-grams, forbidden tokens."""

    ends: tuple[int, ...]
    max_length: int
    min_length: int
    no_repeat: int | None
    forbid: tuple[int, ...]

    @staticmethod
    def of(
        *,
        end: int | Sequence[int] | None,
        max_length: int,
        min_length: int,
        no_repeat: int | None,
        forbid: Sequence[int],
    ) -> Limits:
        """Validate the arguments of a search."""
        ends = () if end is None else tuple(end) if isinstance(end, Sequence) else (end,)
        for token in ends:
            check_int("end", token)
        check_int("max_length", max_length, least=1)
        check_int("min_length", min_length)
        if no_repeat is not None:
            check_int("no_repeat", no_repeat, least=1)
        if min_length > max_length:
            raise ValueError(
                f"min_length must be at most max_length, got min_length={min_length} and max_length={max_length}"
            )
        for token in forbid:
            check_int("forbid", token)
            if token in ends:
                raise ValueError(f"forbid must not contain an end token, got {token} in both")
        return Limits(
            ends=ends, max_length=max_length, min_length=min_length, no_repeat=no_repeat, forbid=tuple(forbid)
        )

    def check(self, vocabulary: int) -> None:
        """Raise unless all tokens are in a vocabulary of this size, and some token may be chosen."""
        for name, tokens in (("end", self.ends), ("forbid", self.forbid)):
            for token in tokens:
                if token >= vocabulary:
                    raise ValueError(f"{name} must be within the vocabulary of {vocabulary}, got {token}")
        if len({*self.ends, *self.forbid}) == vocabulary and self.forbid:
            raise ValueError(
                f"forbid must leave a token to choose, but forbid and end hold all {vocabulary} tokens of the "
                "vocabulary; forbid fewer"
            )
        if len({*self.ends}) == vocabulary and self.min_length:
            raise ValueError(
                f"end must leave a token to choose before min_length={self.min_length}, got all {vocabulary} "
                "tokens of the vocabulary; pass fewer end tokens, or min_length=0"
            )

    def are_ends(self, tokens: Tensor) -> Tensor:
        """Return True for tokens that end a hypothesis."""
        over = tokens == self.ends[0] if self.ends else torch.zeros_like(tokens, dtype=torch.bool)
        for end in self.ends[1:]:  # a comparison each, since `isin` would copy the ends to the device at every step
            over = over | (tokens == end)
        return over

    @property
    def allow_all(self) -> bool:
        """Whether every token may be chosen at every step."""
        return self.no_repeat is None and not self.forbid and not (self.ends and self.min_length)

    def allow(self, logits: Tensor, lengths: Tensor, history: Tensor) -> Tensor:
        """Return logits with -inf for tokens that may not follow; the argument is not modified.

        `lengths` is the number of tokens each row has chosen, `history` all it has read. An end token never counts as a
        repetition, and is allowed before `min_length` if no other token is left.
        """
        allowed, ends = logits, list(self.ends)
        if self.no_repeat is not None:
            allowed = forbid_repeats(logits, history, self.no_repeat)
            if self.ends:
                allowed[:, ends] = logits[:, ends]
        if self.forbid:
            allowed = allowed.clone() if allowed is logits else allowed
            allowed[:, list(self.forbid)] = -math.inf
        if self.ends and self.min_length and bool((early := lengths < self.min_length).any()):
            allowed = allowed.clone() if allowed is logits else allowed
            allowed[:, ends] = allowed[:, ends].masked_fill(early[:, None], -math.inf)
        if self.no_repeat is None or not self.ends:
            return allowed
        if bool((stuck := (allowed.amax(-1) == -math.inf) & (lengths >= 0)).any()):
            allowed[:, ends] = torch.where(stuck[:, None], logits[:, ends], allowed[:, ends])
        return allowed


def forbid_repeats(logits: Tensor, history: Tensor, n: int) -> Tensor:
    """Return logits with -inf for each token that would complete an n-gram that the row has already read.

    Rows are padded on the left with `PAD`.
    """
    if history.shape[1] < n:
        return logits.clone()
    grams = history.unfold(1, n, 1)  # rows grams n
    tail = history[:, history.shape[1] - n + 1 :]
    seen = (grams[..., :-1] == tail[:, None]).all(-1)
    last = grams[..., -1]
    bound = torch.where(seen & (last != PAD), -math.inf, math.inf).to(logits.dtype)
    return logits.scatter_reduce(1, last.clamp(min=0), bound, "amin")
