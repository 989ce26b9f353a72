"""The interface of a model for decoding: start, step, select."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class State(Protocol):
    """The memory of a model between steps, one row per hypothesis.

    A state may also have `attention`, a mapping from names to the attention weights of the last step, for any layers
    and heads: `(rows, heads, source)` after a step of tokens `(rows,)`, and `(rows, heads, n, source)` after one of
    `(rows, n)`. `Hypothesis.attention` returns it.

    It may also have `rows`, the number of rows; None if the tokens decide it. A prefix with another number raises.
    """

    def select(self, rows: Int[Tensor, " chosen"]) -> Self:
        """Return the state of the given rows, in their order; a row may be left out or repeat."""
        ...


class Stepper(Protocol):
    """A model that predicts one token after another: all that decoding needs of a model.

    The source is any argument of `start`, a batch of b rows. Logits have the shape of the tokens and a last dim for
    the vocabulary: `(rows, vocabulary)` for a step of tokens `(rows,)`, and `(rows, n, vocabulary)` for tokens
    `(rows, n)`, as when a prefix or a target to score is read at once. Decoding moves prefixes and sources to the
    device of the parameters, if the stepper is a module or wraps one. Neither method changes its state argument: one
    may step from the same state twice.

    Beam search keeps the hypotheses of one source row in consecutive rows, the same number for each source row. So a
    model may store the keys of its source once per source row, with the beam in the dim of the queries.

    A stepper may also have `read(tokens, state) -> state`, for tokens `(rows, n)`: a step without logits, as for a long
    prompt; and `read_rows(rows, state) -> state` for a list with the tokens of each row, of different lengths, after
    `start(None)`. A search uses each state once, so it asks for `replay_steps(state, steps) -> state`, whose steps may
    overwrite the state before, as CUDA graphs do; `replay_objection() -> str | None` says why they would not.
    """

    def start(self, source: Any) -> Any:
        """Return the `State` before the first token, one row for each row of the source."""
        ...

    def step(self, tokens: Int[Tensor, " rows *n"], state: Any) -> tuple[Float[Tensor, " rows *n vocabulary"], Any]:
        """Read the tokens; return the logits of each next token, and the state after the last."""
        ...


def device_of(stepper: Any) -> torch.device | None:
    """Return the device of a stepper's parameters, or of the steppers that it wraps; None if it has none."""
    if isinstance(stepper, nn.Module):
        return next((x.device for x in stepper.parameters()), None)
    wrapped = getattr(stepper, "members", None) or [getattr(stepper, "stepper", None)]
    return next((device for each in wrapped if each is not None and (device := device_of(each)) is not None), None)


def to_device(source: Any, device: torch.device | None) -> Any:
    """Return a source with its tensors on the device, in dictionaries, tuples and lists too; as it is for None."""
    if device is None:
        return source
    if isinstance(source, Tensor):
        return source.to(device)
    if type(source) is dict:
        return {name: to_device(value, device) for name, value in source.items()}
    if type(source) in (tuple, list):
        return type(source)(to_device(value, device) for value in source)
    return source


def advance(stepper: Stepper, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Make one step, with logits in float32 or better."""
    logits, state = stepper.step(tokens, state)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, state


def read(stepper: Stepper, tokens: Tensor, state: Any) -> Any:
    """Return the state after tokens `(rows, n)`, without logits if the stepper has `read`."""
    read = getattr(stepper, "read", None)
    return stepper.step(tokens, state)[1] if read is None else read(tokens, state)


def read_rows(stepper: Stepper, rows: Sequence[Tensor], state: Any) -> Any:
    """Return the state after the tokens of each row, of different lengths; None if the stepper has no `read_rows`."""
    read = getattr(stepper, "read_rows", None)
    return None if read is None else read(rows, state)


def replay_steps(stepper: Stepper, state: Any, steps: int) -> Any:
    """Return a state for at most `steps` steps that may overwrite the states before, if the stepper has one."""
    method = getattr(stepper, "replay_steps", None)
    return state if method is None else method(state, steps)


@torch.no_grad()
def replay_objection(stepper: Stepper) -> str | None:
    """Return why the steps of a search are not replayed as CUDA graphs; None if they are.

    >>> from regard.models import Gpt, GptConfig
    >>> replay_objection(Gpt(GptConfig(vocabulary=9, dim=8, depth=1, heads=2)))
    'the model is on cpu, and only steps on a CUDA device are recorded'
    """
    method = getattr(stepper, "replay_objection", None)
    if method is not None:
        objection: str | None = method()
        return objection
    return f"{type(stepper).__name__} has no replay_steps(state, steps)"


def rows_of(state: Any) -> int | None:
    """Return the number of rows of a state, None if it does not say."""
    rows = getattr(state, "rows", None)
    return rows if isinstance(rows, int) else None


def attention_of(state: Any) -> dict[str, Tensor]:
    """Return the attention of the last step, {} if the state has none."""
    return dict(getattr(state, "attention", None) or {})
