"""Attention that a model writes out itself: a product, a softmax and a product, seen as one.

    scores = (q @ k.mT / d**0.5).masked_fill(hidden, -inf)
    out = dropout(scores.softmax(-1)) @ v

Of scores it is remembered what they are the product of, what they were multiplied by, and what was added to them or
hidden in them, so that a tape holds q, k and terms as of any other attention. Where something else was done to them
they are kept themselves, queries by keys, as the model did. Either way rows of the weights that the model has found
tell whether it was understood.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, isclose, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.lazy import Weights
from .products import PRODUCTS, Average, average, has_numbers, product
from .scored import HIDES, Scores, Softmaxed, led
from .storage import version_of

ROWS = 8  # of each matrix that are looked at, to see whether it was understood
EXACT, ROUNDED = 1e-3, 0.05  # how far weights may be off, in float32 and in halves


class Written(NamedTuple):
    """One attention that was written out."""

    scores: Scores | None
    logits: Tensor  # b h i j
    found: Tensor  # b h i j: the weights as the model found them
    v: Tensor  # b h j e
    heads: Callable[[Tensor], Tensor]  # makes b h i e of the output, or of its gradient

    @classmethod
    def of(cls, x: Tensor, softmaxed: Softmaxed, average: Average, heads: Callable[[int], int | None]) -> Written:
        """The attention by a softmax, of which x is the tensor, with values; `heads` as `Handwriting.follow` has it.

        Batch dims may have been one for all heads; then the finest there were are taken.
        """
        shape = (x.mT if softmaxed.flipped else x).shape
        softmaxed, h = replace(softmaxed, found=softmaxed.found_in(x)), heads(shape[:-2].numel())
        given, (i, j) = torch.broadcast_shapes(shape[:-2], average.v.shape[:-2]), shape[-2:]
        if given == shape[:-2] and (order := _heads_last(given, h)):
            softmaxed, average = softmaxed.permuted(shape, order), average.permuted(given, order)
            given = torch.Size(given[dim] for dim in order)
            shape = torch.Size((*given, i, j))
        v, scores = average.v, softmaxed.scores
        if scores is not None and prod(scores.lead) != prod(given):
            scores = None
        lead = scores.lead if scores is not None and len(scores.lead) > len(given) else given
        if h and h in (prod(lead[n:]) for n in range(1, len(lead))):
            lead = torch.Size((prod(lead) // h, h))
        elif len(lead) == 1:
            lead = torch.Size((-(-lead[0] // (h or 1)), h or 1))
        lead = torch.Size((prod(lead[:-1]), *lead[-1:])) if lead else torch.Size((1, 1))
        return cls(
            None if scores is None else scores.led(lead),
            softmaxed.logits.reshape(shape).expand(*given, i, j).reshape(*lead, i, j),
            softmaxed.found_in(x).reshape(shape).expand(*given, i, j).reshape(*lead, i, j),
            led(v, given, lead),
            lambda out: average.heads(out).reshape(*lead, i, -1),
        )

    def told(self) -> list[dict[str, Any]]:
        """What a `Reader` is to be told, the plainest first: by queries and keys, or by scores and queries of zeros."""
        q = self.v.new_zeros(()).expand(*self.logits.shape[:3], self.v.shape[-1])
        stored = {"q": q, "k": self.v, "v": self.v, "mask": self.logits}
        if (scores := self.scores) is None:
            return [stored]
        scale = None if isclose(scores.scale, scores.q.shape[-1] ** -0.5, rel_tol=1e-6) else scores.scale
        return [{"q": scores.q, "k": scores.k, "v": self.v, "scale": scale, **scores.terms()}, stored]

    def is_told_by(self, weights: Weights) -> bool:
        """Are these the weights that the model found, as far as some rows tell? Those that see nothing say nothing."""
        if not self.found.numel():
            return True
        rows = torch.linspace(0, self.found.shape[2] - 1, ROWS, device=self.found.device).round().long().unique()
        told = weights[:, :, rows].float()
        found = self.found[:, :, rows, : told.shape[-1]].float().nan_to_num()
        off = (told - found).abs().amax(-1) * (told.sum(-1) > 0)
        return bool((off <= (EXACT if self.logits.dtype.itemsize > 2 else ROUNDED)).all())


class Handwriting:
    """Follows scores through the functions of PyTorch."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], int | None, Scores | Softmaxed]] = {}

    def follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, heads: Callable[[int], int | None]
    ) -> Written | None:
        """Take in one call, that has run, of a function that `touches` scores; return an attention that it ends.

        `heads` says how many of so many matrices, without a dim for heads, are of one text.
        """
        if name in PRODUCTS:
            return self._multiplied(name, args, kwargs, out, heads)
        step = STEPS.get(name)
        if step is None:
            self._notes.pop(id(args[0]), None)
        elif self._notes or step is _softmax:
            note = step(_Call(self, name, args, kwargs, out))
            if note is not None:
                self._note(args[0] if out is None else out, note)
        return None

    def clear(self) -> None:
        """Forget all."""
        self._notes.clear()

    def of(self, x: Any, *, written: bool = False) -> Scores | Softmaxed | None:
        """What is known of a tensor, if nobody but the call that has just `written` to it has done so."""
        note = self._notes.get(id(x))
        known = None if note is None else note[0]()
        if note is None or known is None or known is not x:
            return None
        version, times = version_of(known), note[1]
        once = written and version is not None and times == version - 1
        return note[2] if times == version or once else None

    def _note(self, x: Tensor, what: Scores | Softmaxed) -> None:
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (note := self._notes.get(key)) is not None and note[0] is ref:
                del self._notes[key]

        self._notes[key] = weakref.ref(x, forget), version_of(x), what

    def _multiplied(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor, heads: Callable[[int], int | None]
    ) -> Written | None:
        if self._notes:
            given = args[1:] if name == "einsum" else (*args, *kwargs.values())
            given = given[0] if name == "einsum" and isinstance(given[0], (list, tuple)) else given
            for x in given:
                note = self.of(x)
                if isinstance(note, Softmaxed) and (found := average(name, args, kwargs, x, flipped=note.flipped)):
                    if note.seen:  # the values come first, those of relative positions after
                        return None
                    note.seen.append(True)
                    return Written.of(x, note, found, heads)
        if has_numbers(out) and (scored := product(name, args, kwargs)) is not None:
            self._note(out, Scores.of(scored))
        return None


class _Call(NamedTuple):
    """One call of a function that may have been handed scores, or weights."""

    notes: Handwriting
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any

    def note(self, at: int = 0) -> Scores | Softmaxed | None:
        """What is known of an argument."""
        note = self.notes.of(x := self.given(at), written=self.name.endswith("_"))
        return replace(note, found=note.found_in(x)) if isinstance(note, Softmaxed) and x is not self.out else note

    def given(self, at: int, *names: str, default: Any = None) -> Any:
        """An argument by its place or by one of its names."""
        if len(self.args) > at:
            return self.args[at]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def lead(self) -> torch.Size:
        """The batch dims of what came of it."""
        return self.shape[:-2]

    @property
    def shape(self) -> torch.Size:
        """The shape of what came of it."""
        return (self.args[0] if self.out is None else self.out).shape

    def spreads(self, scores: Scores) -> bool:
        """Has it made more of the scores than there were?"""
        return self.shape.numel() != prod(scores.lead) * scores.q.shape[-2] * scores.k.shape[-2]


Step = Callable[[_Call], "Scores | Softmaxed | None"]


def _scaled(call: _Call) -> Scores | Softmaxed | None:
    factor, note = call.given(1, "other"), call.note()
    if note is None and call.name == "mul":  # a number times scores
        factor, note = call.given(0), call.note(1)
    if isinstance(note, Softmaxed):
        return _weighed(call, note)
    if note is None or "rounding_mode" in call.kwargs or call.spreads(note):
        return None
    divides = call.name not in ("mul", "mul_", "multiply")
    if (number := _number(factor)) is not None:
        return note.times(1 / number if divides else number, call.lead) if number else None
    if isinstance(factor, Tensor) and factor.ndim and factor.shape[-1] == 1:
        return note.times(1 / factor if divides else factor, call.lead)
    return note.gated(factor, call.lead) if isinstance(factor, Tensor) and factor.ndim and not divides else None


def _added(call: _Call) -> Scores | Softmaxed | None:
    other, note = call.given(1, "other"), call.note()
    takes = call.name in ("sub", "sub_", "subtract")
    if not isinstance(note, Scores) and not takes:
        other, note = call.given(0), call.note(1)
    if not isinstance(note, Scores) or other is None or call.spreads(note):
        return None
    if not isinstance(other, Tensor) or other.ndim == 0:
        return note
    factor = call.kwargs.get("alpha", 1) * (-1 if takes else 1)
    return note.plus(other if factor == 1 else other * factor, call.lead)


def _filled(call: _Call) -> Scores | Softmaxed | None:
    return _hidden(call, call.note(), call.given(1, "mask"), call.given(2, "value"))


def _chosen(call: _Call) -> Scores | Softmaxed | None:
    shown, x, y = call.given(0, "condition"), call.given(1, "input"), call.given(2, "other")
    if isinstance(x, Tensor) and x.dtype == torch.bool:  # of a tensor, x.where(shown, y)
        shown, x = x, shown
    if (note := call.notes.of(x)) is not None:
        return _hidden(call, note, ~shown, y)
    return _hidden(call, call.notes.of(y), shown, x)


def _hidden(call: _Call, note: Scores | Softmaxed | None, where: Any, value: Any) -> Scores | Softmaxed | None:
    number = _number(value)
    if note is None or number is None or not isinstance(where, Tensor) or where.dtype != torch.bool:
        return None
    if isinstance(note, Scores):
        if call.spreads(note) or (call.name == "__setitem__" and where.ndim != len(call.shape)):
            return None
        return note.without(where, call.lead, by=number) if number <= HIDES else None
    return _weighed(call, note) if number == 0 and call.name != "__setitem__" else None


def _weighed(call: _Call, note: Softmaxed) -> Softmaxed | None:
    """Other weights of the same scores: whether they are still the softmax of these will be seen."""
    return replace(note, found=None) if call.out.numel() == note.logits.numel() else None


def _bounded(call: _Call) -> Scores | Softmaxed | None:
    """Scores may be kept within bounds that they do not reach."""
    note, low, high = call.note(), call.given(1, "other", "min"), call.given(2, "max")
    if not isinstance(note, Scores) or not isinstance(call.out, Tensor) or call.spreads(note):
        return None
    bounds = [inf if x is None else abs(number) if (number := _number(x)) else 0.0 for x in (low, high)]
    return None if min(bounds) < -HIDES else note if low is None else replace(note, finite=True)


def _same(call: _Call) -> Scores | Softmaxed | None:
    return call.note()


def _left(call: _Call) -> Scores | Softmaxed | None:
    """What may be done to weights and is no part of them."""
    note = call.note()
    return note if isinstance(note, Softmaxed) else None


def _reshaped(call: _Call) -> Scores | Softmaxed | None:
    note, before, after = call.note(), call.args[0].shape if call.args else (), call.out.shape
    if note is None:
        return None
    if before[-2:] == after[-2:]:
        finer = isinstance(note, Scores) and len(after) - 2 > len(note.lead) and prod(note.lead) == prod(after[:-2])
        return note.led(after[:-2]) if isinstance(note, Scores) and finer else note
    if isinstance(note, Scores):
        return None
    if after == (*before, 1) and not note.flipped:
        return replace(note, flipped=True)
    if before == (*after, 1) and note.flipped:
        return replace(note, flipped=False)
    return note if before[-1:] == after[-1:] and not note.flipped else None


def _turned(call: _Call) -> Scores | Softmaxed | None:
    note = call.note()
    if note is None or call.args[0].ndim < 2:
        return None
    shape = call.args[0].shape
    *lead, row, column = _order(call, len(shape))
    if {row, column} != {len(shape) - 2, len(shape) - 1}:
        return None
    if lead != sorted(lead):
        flipped = isinstance(note, Softmaxed) and note.flipped
        note = note.permuted(call.args[0].mT.shape if flipped else shape, lead)
    if row < column:
        return note
    return note.mT if isinstance(note, Scores) else replace(note, flipped=not note.flipped)


def _order(call: _Call, ndim: int) -> list[int]:
    """The dims of a tensor in the order a call puts them in."""
    order = list(range(ndim))
    if call.name in ("mT", "T", "t"):
        return [*order[:-2], *reversed(order[-2:])] if call.name == "mT" or ndim == 2 else order[::-1]
    dims = call.args[1] if len(call.args) == 2 and not isinstance(call.args[1], int) else call.args[1:]
    dims = [*dims, *(x for value in call.kwargs.values() for x in ([value] if isinstance(value, int) else value))]
    if call.name == "permute":
        return [dim % ndim for dim in dims]
    a, b = dims
    order[a], order[b] = order[b], order[a]
    return order


def _softmax(call: _Call) -> Scores | Softmaxed | None:
    x, dim = call.given(0, "input"), call.given(1, "dim")
    if not isinstance(dim, int) or not has_numbers(x) or not x.ndim:
        return None
    behind = x.ndim - 1 - dim % x.ndim
    if behind > 1:
        return None
    scores = call.notes.of(x)
    scores = scores if isinstance(scores, Scores) and scores.zeroed is None else None
    if not behind:
        return Softmaxed(scores, x, flipped=False)
    return Softmaxed(None if scores is None else scores.mT, x.mT, flipped=True)


STEPS: dict[str, Step] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"), _scaled),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract"), _added),
    **dict.fromkeys(("masked_fill", "masked_fill_", "__setitem__"), _filled),
    "where": _chosen,
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_", "clip"), _bounded),
    **dict.fromkeys(("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"), _same),
    **dict.fromkeys(("dropout", "dropout_", "nan_to_num", "nan_to_num_"), _left),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "mT", "T", "t"), _turned),
    "softmax": _softmax,
}

_TOUCHING: dict[Any, str | None] = {Tensor.mT.__get__: "mT", Tensor.T.__get__: "T"}  # type: ignore[attr-defined]


def touches(func: Any) -> str | None:
    """The name of a function that may be a step of an attention, or writes to what it is given; None for others."""
    try:
        return _TOUCHING[func]
    except KeyError:
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.startswith("_")
        return _TOUCHING.setdefault(func, name if name in PRODUCTS or name in STEPS or writes else None)


def _number(x: Any) -> float | None:
    """A number, or the only one of a tensor."""
    return float(x) if isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1) else None


def _heads_last(lead: torch.Size, heads: int | None) -> list[int] | None:
    """The order of batch dims that puts heads, which blocks of keys may come behind, last; None where they are."""
    if heads in (None, *lead[-1:]) or heads not in lead[1:-1] or prod(lead[1:]) == heads:
        return None
    at = lead.index(heads, 1)
    return [*(dim for dim in range(len(lead)) if dim != at), at]
