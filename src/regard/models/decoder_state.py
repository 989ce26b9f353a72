"""Stepping: what decoders with caches have in common, a token read at a time, and attention shown on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from ..nn import KVCache
from ..nn.fast_decode import Plain, Step
from ..nn.linear import Prepared


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedState:
    """What a decoder has read, one row a hypothesis, and what it shows of its last step."""

    caches: tuple[KVCache, ...]  # of each block
    plain: Plain
    weights: Prepared = field(default_factory=Prepared)
    watch: tuple[str, ...] = ()
    attention: Mapping[str, Tensor] = field(default_factory=dict)


State = TypeVar("State", bound=CachedState)


def step(
    tokens: Int[Tensor, " rows *n"],
    state: State,
    *,
    advance: Callable[[Tensor, State], tuple[Tensor, State]],
    advance_plainly: Callable[[Tensor, State, Sequence[Step]], tuple[Tensor, State]],
    logits: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, " rows *n vocabulary"], State]:
    """Read tokens `(rows,)` or `(rows, n)`; the logits of what follows each, and the state after the last.

    `advance` reads tokens `(rows, n)` and may watch, `advance_plainly` tokens `(rows,)` through plain blocks; both
    give what `logits` understands.
    """
    if tokens.ndim > 1:
        x, state = advance(tokens, state)
        return logits(x), state
    with state.weights.for_rows(tokens):
        blocks = None if state.watch else state.plain.steps()
        if blocks is not None:
            x, state = advance_plainly(tokens, state, blocks)
            return logits(x), state
        x, state = advance(tokens[:, None], state)
        seen = {name: A[:, :, 0] for name, A in state.attention.items()}
        return logits(x)[:, 0], replace(state, attention=seen)


def watched(stepper: Any, names: Sequence[str], *, known: Sequence[str]) -> Watched:
    """The stepper as one that shows the attention named."""
    for name in names:
        if name not in known:
            raise ValueError(f"attention is named {', '.join(known)}, got {name!r}")
    return Watched(stepper, tuple(names))


@dataclass(frozen=True)
class Watched:
    """A model as a stepper whose states show the attention of some of its layers."""

    stepper: Any
    names: tuple[str, ...]

    def start(self, source: Any) -> CachedState:
        """The model's state, told what to show."""
        return replace(self.stepper.start(source), watch=self.names)

    def step(self, tokens: Int[Tensor, " rows *n"], state: CachedState) -> tuple[Tensor, CachedState]:
        """The model's step."""
        return self.stepper.step(tokens, state)
