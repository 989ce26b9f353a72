"""Measure which token reaches which output by changing one token at a time, and name what the pattern shows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .call_adapter import CallAdapter

LEAK = {torch.float64: 1e-6, torch.float32: 1e-5}  # share of the largest output; a smaller change is no leak
MEETS = {torch.float64: 1e-13, torch.float32: 1e-9}  # share of the largest output; a smaller change is rounding
SEEDS = (0, 1)


class TokenReach(NamedTuple):
    """The largest change of output i when token j changes, as a share of the largest output: effects[i, j]."""

    effects: Tensor
    dtype: torch.dtype

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.effects.shape[1]

    @property
    def is_square(self) -> bool:
        """Whether there is one output for each token."""
        return self.effects.shape[0] == self.n

    @property
    def meets(self) -> Tensor:
        """Whether token j reaches output i at all."""
        return self.effects > MEETS.get(self.dtype, 1e-6)

    @property
    def leaks(self) -> Tensor:
        """Whether token j clearly reaches output i."""
        return self.effects > LEAK.get(self.dtype, 1e-2)


class ReachPattern(NamedTuple):
    """The bug that a pattern shows, None if there is none, and the counts that show it."""

    bug: str | None
    result: str


def measure_reach(adapter: CallAdapter, n: int) -> TokenReach:
    """Change each of n tokens in turn, with two different texts."""
    columns: list[Tensor] = []
    for seed in SEEDS:
        x = adapter.tokens(n, seed)
        before = adapter.run(x)
        changed = [change_of(before, adapter.run(adapter.change(x, j, seed))) for j in range(n)]
        columns.append(torch.stack(changed, 1))
    return TokenReach(torch.stack(columns).amax(0), adapter.dtype)


def measure_context_reach(adapter: CallAdapter, n: int) -> TokenReach:
    """Change each token of the other sequence in turn."""
    x, context = adapter.tokens(n), adapter.context_tokens(adapter.batch)
    before = adapter.run(x, context)
    changed = [change_of(before, adapter.run(x, adapter.change(context, j))) for j in range(context.shape[1])]
    return TokenReach(torch.stack(changed, 1), adapter.dtype)


def change_of(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change of each output position over texts and features, as a share of the largest output."""
    a, b = (x.nan_to_num(nan=1e3, posinf=1e3, neginf=-1e3) for x in (before, after))
    if a.ndim == 2:
        a, b = a[:, None], b[:, None]  # one vector for a text: b e -> b 1 e
    change = (a - b).abs().transpose(0, 1).flatten(1).amax(1)
    return (change / a.abs().amax().clamp(min=1e-30)).double()


def texts_that_change(adapter: CallAdapter, n: int) -> bool:
    """Return whether a change of the last text of a batch changes the others."""
    x = adapter.tokens(n)
    y = x.clone()
    y[-1] = adapter.tokens(n, 5)[-1]
    before, after = adapter.run(x), adapter.run(y)
    return bool((change_of(before[:-1], after[:-1]) > LEAK.get(adapter.dtype, 1e-2)).any())


def guess_causal(reach: TokenReach) -> tuple[bool, str]:
    """Return whether a module is meant to be causal, by what reaches what, and the reason."""
    ahead, behind, pairs = _counts(reach)
    if ahead == behind == 0:
        return False, "not causal, since no token reaches the output of another"
    if behind > 0 and ahead == 0:
        return True, "causal, since no token reaches an earlier output"
    if ahead <= 0.8 * behind:
        return True, f"causal, since {behind} of {pairs} pairs look back and only {ahead} look ahead"
    if behind <= 0.5 * ahead:
        return True, f"causal with a wrong mask, since {ahead} of {pairs} pairs look ahead and only {behind} look back"
    return False, "not causal, since tokens look ahead as they look back; pass causal=True if they must not"


def read_causal(reach: TokenReach) -> ReachPattern:
    """Name the bug of a causal module, judged by what reaches what."""
    n, ahead = reach.n, reach.leaks.triu(1)
    behind = reach.meets.tril(-1)
    count, back, pairs = _counts(reach)
    if not count:
        return ReachPattern(None, "")
    rows = ahead.any(1).nonzero().flatten().tolist()
    if back == 0 and count > pairs // 2:
        return ReachPattern("reversed-mask", f"{count} of {pairs} pairs reach an earlier output and none a later one")
    expected = torch.ones(n, n).triu(1).tril(1).bool()
    if torch.equal(ahead, expected) and bool(behind[1:].any()):
        return ReachPattern("positions", "each token reaches the output just before it, and none before that")
    if (
        rows == list(range(len(rows)))
        and len(rows) <= n // 2
        and bool(ahead[rows].sum(1).eq(n - 1 - torch.tensor(rows)).all())
    ):
        return ReachPattern("empty-rows", f"outputs {rows} see all later tokens, and the others none")
    first, token = ahead.nonzero()[0].tolist()
    share = f"{count} of {pairs} pairs of tokens leak"
    return ReachPattern("future-leak", f"{share}; for example token {token} changes output {first}")


def prefix_of(reach: TokenReach) -> int | None:
    """Return the number of tokens at the start that all outputs see in an otherwise causal module; None if none."""
    ahead = reach.leaks.triu(1).cpu()
    for size in range(2, reach.n):
        if torch.equal(ahead, torch.ones_like(ahead).triu(1) & (torch.arange(reach.n) < size)):
            return size
    return None


def gaps(reach: TokenReach, *, causal: bool) -> Tensor:
    """Return the pairs (i, j) that should meet and do not."""
    allowed = torch.ones_like(reach.meets)
    return (allowed.tril() if causal and reach.is_square else allowed) & ~reach.meets


def is_regular(short: TokenReach, long: TokenReach | None, *, causal: bool) -> str | None:
    """Return in words why pairs that never meet look intended: a window, chunks or global tokens; None if they do not.

    A window depends on distance alone, and chunks have the same size at two lengths.
    """
    meets = short.meets
    if not short.is_square or bool((meets.sum(1) <= 1).all()):
        return None
    full = meets.tril() if causal else meets
    if _depends_on_distance(full, causal=causal):
        return f"a window: each token sees at most {int(full.sum(1).amax())} tokens"
    size = _chunk(full, causal=causal)
    if size is not None and long is not None and long.is_square:
        other = _chunk(long.meets.tril() if causal else long.meets, causal=causal)
        if other == size:
            return f"chunks of {size} tokens"
    if not causal:
        outside = ~(meets.all(1)[:, None] | meets.all(0)[None])
        kept = outside.any(1).nonzero().flatten()
        if 0 < len(kept) < short.n and _depends_on_distance(meets[kept][:, kept], causal=False):
            return "a window with tokens that see all"
    return None


def _counts(reach: TokenReach) -> tuple[int, int, int]:
    """Return the number of pairs that look ahead, that look back, and of all pairs on one side."""
    ahead, behind = int(reach.leaks.triu(1).sum()), int(reach.meets.tril(-1).sum())
    return ahead, behind, reach.n * (reach.n - 1) // 2


def _depends_on_distance(meets: Tensor, *, causal: bool) -> bool:
    n = len(meets)
    offsets = range(1 - n, 1 if causal else n)
    lines = [meets.diagonal(offset) for offset in offsets]
    return bool(meets.any()) and all(bool(line.all()) or not bool(line.any()) for line in lines)


def _chunk(meets: Tensor, *, causal: bool) -> int | None:
    """Return the size of the chunks if tokens see all of their own chunk and nothing else."""
    n = len(meets)
    i = torch.arange(n)
    for size in range(2, n):
        same = i[:, None] // size == i[None] // size
        if torch.equal(meets.cpu(), same.tril() if causal else same):
            return size
    return None
