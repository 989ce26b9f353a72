"""What decoding asks of a model: start, step, select."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor


class State(Protocol):
    """What a model remembers between steps, one row a hypothesis.

    A state may also have `attention`, a mapping from names to the weights of the step just made, whatever layers and
    heads the caller wants to see: `(rows, heads, source)` after a step of tokens `(rows,)`, and
    `(rows, heads, n, source)` after one of `(rows, n)`. It comes out on `Hypothesis.attention`.

    And it may have `rows`, their number, None where that is left to the tokens: a prefix of other than that is refused.
    """

    def select(self, rows: Int[Tensor, " chosen"]) -> Self:
        """The state of these rows, in this order; rows may be left out and may come more than once."""
        ...


class Stepper(Protocol):
    """A model that writes one token after another: the only thing decoding knows of it.

    The source is whatever `start` understands, a batch of b rows. Logits have the shape of the tokens with the
    vocabulary behind it: `(rows, vocabulary)` for tokens `(rows,)`, the plain step, and `(rows, n, vocabulary)` for
    tokens `(rows, n)`, as when a prefix or a target to score is read at once. Neither method changes a state it is
    given: the same state may be stepped from twice.

    Beam search keeps the hypotheses of one source row side by side and equally many of each, so a model may hold the
    keys of its source once a source row, and let the beam stand where queries stand.

    A stepper may also have `read(tokens, state) -> state`, for tokens `(rows, n)`: a step whose logits nobody wants,
    as of a long prompt.
    """

    def start(self, source: Any) -> Any:
        """The `State` before the first token, one row for each row of the source."""
        ...

    def step(self, tokens: Int[Tensor, " rows *n"], state: Any) -> tuple[Float[Tensor, " rows *n vocabulary"], Any]:
        """Read the tokens; the logits of what follows each, and the state after the last."""
        ...


def advance(stepper: Stepper, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """One step, with logits in float32 or better."""
    logits, state = stepper.step(tokens, state)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, state


def read(stepper: Stepper, tokens: Tensor, state: Any) -> Any:
    """The state after tokens `(rows, n)` that are given, not chosen."""
    read = getattr(stepper, "read", None)
    return stepper.step(tokens, state)[1] if read is None else read(tokens, state)


def rows_of(state: Any) -> int | None:
    """How many rows a state has, where it says so."""
    rows = getattr(state, "rows", None)
    return rows if isinstance(rows, int) else None


def attention_of(state: Any) -> dict[str, Tensor]:
    """The attention a state shows of its last step, if any."""
    return dict(getattr(state, "attention", None) or {})
