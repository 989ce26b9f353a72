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
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isclose, prod
from operator import add, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.lazy import Weights
from .products import PRODUCTS, Average, Product, average, product
from .storage import version_of

HIDES = -1e4  # a score filled with this or less gets no weight
ROWS = 8  # of each matrix that are looked at, to see whether it was understood
EXACT, ROUNDED = 1e-3, 0.05  # how far weights may be off, in float32 and in halves


@dataclass(frozen=True, eq=False)
class Scores:
    """What a tensor is: scale * q @ k.mT + added, but for what is hidden."""

    q: Tensor  # *lead i d
    k: Tensor  # *lead j d
    lead: torch.Size
    scale: float = 1.0
    added: tuple[Tensor, ...] = ()  # each broadcasts to *lead i j
    hidden: tuple[Tensor, ...] = ()  # each broadcasts too, True = hidden
    finite: bool = True  # hidden by numbers, over which a row that sees nothing else spreads evenly?

    @classmethod
    def of(cls, found: Product) -> Scores:
        lead = torch.broadcast_shapes(found.left.shape[:-2], found.right.shape[:-2])
        return cls(found.left, found.right, lead, found.scale, () if found.added is None else (found.added,))

    @property
    def mT(self) -> Scores:
        """The same with queries and keys in each other's place."""
        return replace(self._mapped(lambda x: x.mT), q=self.k, k=self.q)

    def times(self, factor: float | Tensor, lead: torch.Size) -> Scores:
        """Multiplied, by a number or by one for each row, in a tensor whose batch dims are `lead`."""
        if isinstance(factor, Tensor):
            factor = led(_matrix(factor), lead, self.lead)
            return replace(self, q=self.q * factor, added=tuple(x * factor for x in self.added))
        return replace(self, scale=self.scale * factor, added=tuple(x * factor for x in self.added))

    def plus(self, x: Tensor, lead: torch.Size) -> Scores:
        """With numbers added; one for a whole row changes no weights."""
        x = led(_matrix(x), lead, self.lead)
        return self if x.shape[-1] == 1 < self.k.shape[-2] else replace(self, added=(*self.added, x))

    def without(self, hidden: Tensor, lead: torch.Size, *, by: float) -> Scores:
        """With some of them hidden."""
        hides = (*self.hidden, led(_matrix(hidden), lead, self.lead))
        return replace(self, hidden=hides, finite=self.finite and by > -torch.inf)

    def led(self, lead: torch.Size) -> Scores:
        """With other batch dims for the same matrices."""
        if lead == self.lead:
            return self
        moved = self._mapped(lambda x: led(x, self.lead, lead))
        return replace(moved, q=led(self.q, self.lead, lead), k=led(self.k, self.lead, lead), lead=lead)

    def mask(self) -> Tensor | None:
        """What is added and what is hidden, as one tensor of numbers."""
        if not self.added and not self.hidden:
            return None
        total = reduce(add, self.added) if self.added else torch.zeros(1, 1, device=self.q.device)
        if not self.hidden:
            return total
        total = total if total.is_floating_point() else total.float()
        return torch.where(reduce(or_, self.hidden), torch.finfo(total.dtype).min if self.finite else -torch.inf, total)

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> Scores:
        return replace(self, added=tuple(map(fn, self.added)), hidden=tuple(map(fn, self.hidden)))


@dataclass(frozen=True, eq=False)
class Softmaxed:
    """What a tensor is: the softmax of scores."""

    scores: Scores | None  # None where they are more than a product
    logits: Tensor  # as they were handed to the softmax, keys in the last dim
    flipped: bool  # has the tensor its keys in the last dim but one?
    found: Tensor | None = None  # what the softmax made of them, keys last; None where that is the tensor
    seen: list[bool] = field(default_factory=list)  # was it multiplied with values?

    def found_in(self, x: Tensor) -> Tensor:
        """The weights that the softmax found, of which this is the tensor."""
        return self.found if self.found is not None else x.mT if self.flipped else x


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
        v, scores, shape = average.v, softmaxed.scores, (x.mT if softmaxed.flipped else x).shape
        given, (i, j) = torch.broadcast_shapes(shape[:-2], v.shape[:-2]), shape[-2:]
        if scores is not None and prod(scores.lead) != prod(given):
            scores = None
        lead = scores.lead if scores is not None and len(scores.lead) > len(given) else given
        if len(lead) == 1:
            h = heads(lead[0]) or 1
            lead = torch.Size((lead[0] // h, h))
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
        return [{"q": scores.q, "k": scores.k, "v": self.v, "mask": scores.mask(), "scale": scale}, stored]

    def is_told_by(self, weights: Weights) -> bool:
        """Are these the weights that the model found, as far as some rows tell? Those that see nothing say nothing."""
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

    def of(self, x: Tensor, *, written: bool = False) -> Scores | Softmaxed | None:
        """What is known of a tensor, if nobody but the call that has just `written` to it has done so."""
        note = self._notes.get(id(x))
        if note is None or note[0]() is not x:  # None, or an id that was another's
            return None
        version, times = version_of(x), note[1]
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
        if (scored := product(name, args, kwargs)) is not None:
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
        return (self.args[0] if self.out is None else self.out).shape[:-2]


Step = Callable[[_Call], "Scores | Softmaxed | None"]


def _scaled(call: _Call) -> Scores | Softmaxed | None:
    factor, note = call.given(1, "other"), call.note()
    if not isinstance(note, Scores) and call.name == "mul":  # a number times scores
        factor, note = call.given(0), call.note(1)
    if not isinstance(note, Scores) or "rounding_mode" in call.kwargs:
        return None
    divides = call.name not in ("mul", "mul_", "multiply")
    if (number := _number(factor)) is not None:
        return note.times(1 / number if divides else number, call.lead) if number else None
    if isinstance(factor, Tensor) and factor.ndim and factor.shape[-1] == 1:
        return note.times(1 / factor if divides else factor, call.lead)
    return None


def _added(call: _Call) -> Scores | Softmaxed | None:
    other, note = call.given(1, "other"), call.note()
    takes = call.name in ("sub", "sub_", "subtract")
    if not isinstance(note, Scores) and not takes:
        other, note = call.given(0), call.note(1)
    if not isinstance(note, Scores) or other is None:
        return None
    if not isinstance(other, Tensor) or other.ndim == 0:
        return note
    factor = call.kwargs.get("alpha", 1) * (-1 if takes else 1)
    return note.plus(other if factor == 1 else other * factor, call.lead)


def _filled(call: _Call) -> Scores | Softmaxed | None:
    return _hidden(call, call.note(), call.given(1, "mask"), call.given(2, "value"))


def _chosen(call: _Call) -> Scores | Softmaxed | None:
    shown, x, y = call.given(0, "condition"), call.given(1, "input"), call.given(2, "other")
    if (note := call.note(1)) is not None:
        return _hidden(call, note, ~shown, y)
    return _hidden(call, call.note(2), shown, x)


def _hidden(call: _Call, note: Scores | Softmaxed | None, where: Any, value: Any) -> Scores | Softmaxed | None:
    number = _number(value)
    if note is None or number is None or not isinstance(where, Tensor) or where.dtype != torch.bool:
        return None
    if isinstance(note, Scores):
        if call.name == "__setitem__" and where.ndim != len(call.lead) + 2:
            return None
        return note.without(where, call.lead, by=number) if number <= HIDES else None
    return replace(note, found=None) if number == 0 else None


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
    note, x = call.note(), call.args[0]
    if note is None or not _swaps(call, x.ndim):
        return None
    return note.mT if isinstance(note, Scores) else replace(note, flipped=not note.flipped)


def _swaps(call: _Call, ndim: int) -> bool:
    """Does a call swap the last two dims, and nothing else?"""
    if call.name in ("mT", "adjoint"):
        return True
    if call.name in ("T", "t"):
        return ndim == 2
    dims = call.args[1] if len(call.args) == 2 and not isinstance(call.args[1], int) else call.args[1:]
    dims = [dim % ndim for dim in (*dims, *(x for x in call.kwargs.values() if isinstance(x, int)))]
    last = [ndim - 2, ndim - 1]
    return dims == [*range(ndim - 2), *reversed(last)] if call.name == "permute" else sorted(dims) == last


def _softmax(call: _Call) -> Scores | Softmaxed | None:
    x, dim = call.given(0, "input"), call.given(1, "dim")
    if not isinstance(dim, int) or not x.ndim:
        return None
    behind = x.ndim - 1 - dim % x.ndim
    if behind > 1:
        return None
    scores = call.notes.of(x)
    scores = scores if isinstance(scores, Scores) else None
    if not behind:
        return Softmaxed(scores, x, flipped=False)
    return Softmaxed(None if scores is None else scores.mT, x.mT, flipped=True)


STEPS: dict[str, Step] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"), _scaled),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract"), _added),
    **dict.fromkeys(("masked_fill", "masked_fill_", "__setitem__"), _filled),
    "where": _chosen,
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


def _matrix(x: Tensor) -> Tensor:
    return x if x.ndim > 1 else x[None]


def led(x: Tensor, given: torch.Size, lead: torch.Size) -> Tensor:
    """A tensor that broadcasts to matrices with batch dims `given`, with others, `lead`, for the same matrices."""
    if given == lead or x.ndim <= 2:
        return x
    last = x.shape[-2:]
    if x.shape[:-2].numel() == 1:
        return x.reshape(*(1 for _ in lead), *last)
    return x.expand(*given, *last).reshape(*lead, *last)
