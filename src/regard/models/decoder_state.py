"""States of decoders with caches: one step reads a token per row, and may record attention on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from ..nn import KeyValues, KVCache
from ..nn.fast_decode import FastSteps, Step


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedState:
    """The state of a decoder, one row per hypothesis, and the attention it recorded in its last step.

    `caches` holds one per block, `fast` the blocks as functions of one token per row, `watch` the names of the layers
    whose attention is recorded. A decoder with a `source` has `each` hypotheses of it in consecutive rows.
    """

    caches: tuple[KVCache, ...]
    fast: FastSteps
    source: tuple[KeyValues, ...] = ()  # one per block
    each: int = 1
    watch: tuple[str, ...] = ()
    attention: Mapping[str, Tensor] = field(default_factory=dict)


StateT = TypeVar("StateT", bound=CachedState)


class Advance(Protocol[StateT]):
    """Read tokens `(rows, n)`; return the last hidden states, and the state of the decoder after them."""

    def __call__(
        self, tokens: Tensor, state: StateT, blocks: Sequence[Step] | None = None
    ) -> tuple[Tensor, StateT]: ...


def step(
    tokens: Int[Tensor, " rows *n"], state: StateT, *, advance: Advance[StateT], logits: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, " rows *n vocabulary"], StateT]:
    """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last.

    For tokens `(rows,)`, `advance` runs over fast steps in place of the blocks, unless attention is recorded.
    """
    if tokens.ndim > 1:
        x, state = advance(tokens, state)
        return logits(x), state
    with state.fast.prepacked.for_rows(tokens):
        x, state = advance(tokens[:, None], state, None if state.watch else state.fast.steps())
        attention = {name: A[:, :, 0] for name, A in state.attention.items()}  # b h 1 j -> b h j
        return logits(x)[:, 0], replace(state, attention=attention)


def watch_attention(stepper: Any, names: Sequence[str], *, known: Sequence[str]) -> Watched:
    """Return a stepper that records the attention of the layers named."""
    for name in names:
        if name not in known:
            raise ValueError(f"no attention is named {name!r}; pass one of {', '.join(known)}")
    return Watched(stepper, tuple(names))


@dataclass(frozen=True)
class Watched:
    """A model as a stepper whose states hold the attention of some of its layers."""

    stepper: Any
    names: tuple[str, ...]

    def start(self, source: Any) -> CachedState:
        """Return the first state of the model, with the layers to record."""
        return replace(self.stepper.start(source), watch=self.names)

    def step(self, tokens: Int[Tensor, " rows *n"], state: CachedState) -> tuple[Tensor, CachedState]:
        """Make a step of the model."""
        return self.stepper.step(tokens, state)
