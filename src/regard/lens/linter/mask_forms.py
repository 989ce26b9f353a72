"""Find out how a mask argument is meant: its shape, its numbers, and whether True means attend or hide.

Each argument is tried in the forms in which attention code takes masks. Every try hides token 1 of the text, and asks
whether a change of that token, or of the others, changes the other outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...ops.terms.masks import Dense
from .call_adapter import CallAdapter
from .token_reach import LEAK, MEETS, change_of

Meaning = Literal["attend", "hide"]
HIDDEN = 1  # the token that is hidden
MEANS_HIDE = re.compile(r"(\w+_)?key_padding_mask", re.IGNORECASE)
MEANS_ATTEND = re.compile(r"(\w+_)?attention_mask|keep|valid\w*|(\w+_)?(lengths?|lens)", re.IGNORECASE)
COUNTS = re.compile(r".*(lengths?|lens)", re.IGNORECASE)


class MaskForm(NamedTuple):
    """How a mask is passed: `make` turns keep, b n and True for real tokens, into the argument."""

    argument: str
    name: str
    make: Callable[[Tensor], Any]
    is_per_text: bool  # False if one mask holds for all texts
    has_polarity: bool  # False for additive masks and lengths
    on_context: bool = False


class MaskReading(NamedTuple):
    """A form that runs, and what True means in it: None if the mask hides nothing."""

    form: MaskForm
    means: Meaning | None

    def __call__(self, keep: Tensor) -> dict[str, Any]:
        """Return the argument that hides what `keep` does not keep."""
        flip = self.form.has_polarity and self.means == "hide"
        return {self.form.argument: self.form.make(~keep if flip else keep)}


def read_mask(adapter: CallAdapter, argument: str, *, n: int) -> list[MaskReading]:
    """Return the forms in which an argument runs; those that hide tokens come first."""
    readings: list[MaskReading] = []
    for form in _forms(adapter, argument):
        if any(each.means and each.form.is_per_text == form.is_per_text for each in readings):
            continue
        means = _meaning(adapter, form, n)
        if means is not _FAILED:
            readings.append(MaskReading(form, means))
    return sorted(readings, key=lambda reading: reading.means is None)


def expected_meaning(argument: str) -> Meaning | None:
    """Return what True means by the name of a mask argument; None if libraries use the name for both."""
    if MEANS_HIDE.fullmatch(argument):
        return "hide"
    return "attend" if MEANS_ATTEND.fullmatch(argument) else None


_FAILED: Any = object()


def _meaning(adapter: CallAdapter, form: MaskForm, n: int) -> Any:
    """Return "attend", "hide", None if the mask hides nothing, or _FAILED if the call raises."""
    context = adapter.context_tokens(adapter.batch) if form.on_context else None
    x = adapter.tokens(n)
    length = n if context is None else context.shape[1]
    keep = torch.ones(adapter.batch, length, dtype=torch.bool, device=adapter.device)
    if COUNTS.fullmatch(form.argument):
        keep[:, -HIDDEN:] = False
        hidden, others = length - 1, list(range(length - 1))
    else:
        keep[:, HIDDEN] = False
        hidden, others = HIDDEN, [j for j in range(length) if j != HIDDEN]

    def effect(token: int, kept: Tensor) -> Tensor:
        """Return the change of the outputs other than the token's own if the token changes."""
        extra = {form.argument: form.make(kept)}
        if context is None:
            before = adapter.run(x, **extra)
            if plain is not None and before.shape != plain.shape:  # broadcast against another dim
                raise ValueError(form.name)
            change = change_of(before, adapter.run(adapter.change(x, token), **extra))
            if len(change) == n:
                change[[token, hidden]] = 0.0
        else:
            other = adapter.change(context, token)
            change = change_of(adapter.run(x, context, **extra), adapter.run(x, other, **extra))
        return change.amax()

    plain = adapter.run(x) if context is None else None
    try:
        for means in ("attend", "hide") if form.has_polarity else ("attend",):
            kept = keep if means == "attend" else ~keep
            if effect(hidden, kept) <= LEAK.get(adapter.dtype, 1e-2) and any(
                effect(token, kept) > MEETS.get(adapter.dtype, 1e-6) for token in others[:2]
            ):
                return means
    except Exception:  # the module may raise anything on a form that is not its own
        return _FAILED
    return None


def _forms(adapter: CallAdapter, argument: str) -> list[MaskForm]:
    """Return the forms in which an argument may take a mask, the likeliest first."""
    is_context = bool(adapter.context) and (
        adapter.reads_context_only
        or argument.startswith(("memory", "src", "context", "encoder"))
        or argument == "attention_mask"
    )

    def form(name: str, make: Callable[[Tensor], Any], *, per_text: bool = True, polarity: bool = True) -> MaskForm:
        return MaskForm(argument, name, make, per_text, polarity, is_context)

    def additive(keep: Tensor) -> Tensor:
        return torch.zeros(keep.shape, dtype=adapter.dtype, device=keep.device).masked_fill(~keep, float("-inf"))

    texts = [
        form("b n of bool", lambda keep: keep),
        form("b n of 0 and 1", lambda keep: keep.long()),
        form("b 1 1 n of bool", lambda keep: keep[:, None, None]),
        form("b 1 1 n of 0 and 1", lambda keep: keep[:, None, None].long()),
        form("b 1 n of bool", lambda keep: keep[:, None]),
        form("b n n of bool", lambda keep: _square(keep)),
        form("b 1 1 n of 0 and -inf", lambda keep: additive(keep)[:, None, None], polarity=False),
    ]
    pairs = [
        form("n n of bool", lambda keep: _square(keep)[0], per_text=False),
        form("n n of 0 and 1", lambda keep: _square(keep)[0].long(), per_text=False),
        form("n n of 0 and -inf", lambda keep: additive(_square(keep)[0]), per_text=False, polarity=False),
        form("a mask of regard", lambda keep: Dense(_square(keep)[:, None]), polarity=False),
    ]
    if COUNTS.fullmatch(argument):
        return [form("lengths", lambda keep: keep.sum(1), polarity=False)]
    if MEANS_HIDE.fullmatch(argument) or MEANS_ATTEND.fullmatch(argument) or "pad" in argument.lower():
        return texts
    # Such arguments usually take one matrix n n; b n could be broadcast over heads or texts without an error.
    return pairs[:1] + texts[2:4] + texts[:2] + texts[4:] + pairs[1:]


def _square(keep: Tensor) -> Tensor:
    """b n -> b n n, the same keys for each query"""
    return keep[:, None].expand(-1, keep.shape[1], -1).contiguous()
