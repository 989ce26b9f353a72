"""Select tokens: by position, by slice, by group, by a function of the tokens, or those that a model generates.

Positions count the real tokens of each batch row, so padding has none, and position 3 is the same token with padding
on either side or without. Negative positions count from the last token that the call sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..tape.groups import Groups


@dataclass(frozen=True)
class GeneratedTokens:
    """The tokens that a model generates: those behind the prompt."""

    def __repr__(self) -> str:
        return "generated"


generated = GeneratedTokens()

TokenFunction = Callable[[Sequence[str]], Any]  # from the tokens of a batch row to a selection of them
Selection = int | slice | Iterable[int] | TokenFunction | GeneratedTokens
EXAMPLES = "-1, slice(0, 4), [2, 5], words(tokens)['cat'], generated or a function of the tokens"


@dataclass(frozen=True, eq=False)
class TokenAxis:
    """The tokens along one axis of an attention: its queries or its keys."""

    positions: Tensor  # b n: the position of each token in its text
    real: Tensor  # b n: False for padding
    count: Tensor  # b 1: number of tokens so far, those included that a cache has dropped
    prompt: Tensor | None = None  # b 1: number of tokens before the first generated one; None if unknown
    texts: Sequence[Sequence[str]] | None = None  # the tokens of each batch row, without padding
    refusal: str | None = None  # the reason why the positions are not known
    _found: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)

    def row(self, n: int) -> TokenAxis:
        """Return the tokens of one batch row."""
        prompt = None if self.prompt is None else self.prompt[n : n + 1]
        positions, real, count = (x[n : n + 1] for x in (self.positions, self.real, self.count))
        return replace(self, positions=positions, real=real, count=count, prompt=prompt, texts=None, _found={})

    def select(self, selection: Selection) -> Tensor:
        """Return True for each selected token, `b n`; computed once for each selection."""
        if id(selection) not in self._found:  # the dict keeps the selection alive, so that its id stays unique
            self._found[id(selection)] = selection, self._select(selection) & self.real
        return self._found[id(selection)][1]

    def _select(self, selection: Any) -> Tensor:
        positions, count = self.positions, self.count
        if self.refusal is not None:
            raise ValueError(self.refusal)
        if isinstance(selection, GeneratedTokens):
            if self.prompt is None:
                raise ValueError("generated tokens are known only if the prompt runs within the block of edit, too")
            return positions >= self.prompt
        if isinstance(selection, slice):
            start, step = _slice_bound(selection.start, 0, count), selection.step or 1
            return (
                (positions >= start)
                & (positions < _slice_bound(selection.stop, count, count))
                & ((positions - start) % step == 0)
            )
        if callable(selection):
            if self.texts is None:
                raise ValueError(
                    f"{name_of(selection)} selects by tokens, and edit was not given those of this layer; "
                    "write edit(model, edits, tokens)"
                )
            chosen = [checked_selection("its tokens", selection(text)) for text in self.texts]
            return torch.cat([self.row(n).select(each) for n, each in enumerate(chosen)])
        numbers = (selection,) if isinstance(selection, int) else selection
        from_start, from_end = (
            positions.new_tensor([n for n in numbers if (n < 0) is is_negative]) for is_negative in (False, True)
        )
        return torch.isin(positions, from_start) | torch.isin(positions - count, from_end)


def _slice_bound(given: int | None, default: int | Tensor, count: Tensor) -> int | Tensor:
    if given is None:
        return default
    return given if given >= 0 else (count + given).clamp(min=0)


def checked_selection(what: str, value: Any) -> Any:
    """Return a selection as `TokenAxis.select` takes it: lists and tensors of positions become tuples."""
    if isinstance(value, Groups):
        raise TypeError(f"{what} must name a group: {type(value).__name__}(...)[{value.labels[0]!r}], for one")
    if isinstance(value, (bool, str)):
        raise TypeError(f"{what} must be positions of tokens, got {value!r}; write {EXAMPLES}")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, slice):
        if not all(x is None or isinstance(x, int) for x in (value.start, value.stop, value.step)) or (
            value.step is not None and value.step < 1
        ):
            raise ValueError(f"{what} must be a slice of whole numbers with a step of 1 or more, got {value!r}")
        return value
    if isinstance(value, GeneratedTokens):
        return value
    if isinstance(value, Tensor):
        value = value.tolist() if value.ndim == 1 else None
    if isinstance(value, Iterable):
        numbers = list(value)
        if all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
            return tuple(map(int, numbers))
    elif callable(value):
        return value
    raise TypeError(f"{what} must be positions of tokens, got {value!r}; write {EXAMPLES}")


def name_of(value: Any) -> str:
    """Return a selection as source; a function by its name."""
    if isinstance(value, slice):
        given = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
        return f"slice({', '.join(map(repr, given))})"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return repr(value)
