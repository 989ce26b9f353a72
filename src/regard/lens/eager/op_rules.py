"""Strokes: what functions of PyTorch make of scores, and of the softmax of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..recording.store import version_of
from .matmul import has_data
from .symbolic_scores import MAX_HIDDEN_SCORE, Scores, ScoresWithSink, SoftmaxOutput, WeightedValues

FADES = 1e-2  # scores that are hidden by a number and made smaller than this may be seen again

SOFTMAX = "softmax"

SymbolicValue = Scores | ScoresWithSink | SoftmaxOutput | WeightedValues


class SymbolicTensors:
    """What is known of tensors, as long as they live and nobody writes to them."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], int | None, SymbolicValue]] = {}
        self.linear_output: Callable[[], Tensor | None] = lambda: None  # what the latest linear map made

    def get(self, x: Any, *, written: bool = False) -> SymbolicValue | None:
        """What is known of a tensor, if nobody but the call that has just `written` to it has done so."""
        note = self.entries.get(id(x))
        if note is None or (held := note[0]()) is None or held is not x:
            return None
        version, times = version_of(held), note[1]
        once = written and version is not None and times == version - 1
        return note[2] if times == version or once else None

    def add(self, x: Tensor, what: SymbolicValue) -> None:
        """SymbolicValue what a tensor is."""
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (note := self.entries.get(key)) is not None and note[0] is ref:
                del self.entries[key]

        self.entries[key] = weakref.ref(x, forget), version_of(x), what

    def forget(self, x: Any) -> None:
        """Forget what a tensor was before it was written to, and views of it that do not count how often."""
        self.entries.pop(id(x), None)
        if isinstance(x, Tensor) and x.is_inference():
            memory = x.untyped_storage().data_ptr()
            for key, (ref, _, _) in list(self.entries.items()):
                if (other := ref()) is None or other.untyped_storage().data_ptr() == memory:
                    self.entries.pop(key, None)

    def forget_softmax(self, seen: SoftmaxOutput) -> None:
        """Forget a softmax that has been seen: whoever trains holds its tensors until the backward pass."""
        for key, (_, _, note) in list(self.entries.items()):
            softmaxed = note.softmaxed if isinstance(note, WeightedValues) else note
            if isinstance(softmaxed, SoftmaxOutput) and softmaxed.averaged is seen.averaged:
                del self.entries[key]

    def clear(self) -> None:
        """Forget all."""
        self.entries.clear()
        self.linear_output = lambda: None


class OpCall(NamedTuple):
    """One call, that has run, of a function that may have been handed scores, or weights."""

    symbolic: SymbolicTensors
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any

    def note(self, at: int = 0) -> Scores | SoftmaxOutput | None:
        """What is known of an argument."""
        note = self.symbolic.get(x := self.argument(at), written=self.name.endswith("_"))
        if isinstance(note, SoftmaxOutput) and x is not self.out:
            return replace(note, found=note.weights_in(x))
        return note if isinstance(note, (Scores, SoftmaxOutput)) else None

    def argument(self, at: int, *names: str, default: Any = None) -> Any:
        """An argument by its place or by one of its names."""
        if len(self.args) > at:
            return self.args[at]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def lead(self) -> torch.Size:
        """The batch dims of what came of it."""
        return self.shape[:-2]

    @property
    def result(self) -> Tensor:
        """What came of it, where it wrote to what it was given."""
        return self.args[0] if self.out is None else self.out

    @property
    def shape(self) -> torch.Size:
        """The shape of what came of it."""
        return self.result.shape

    def spreads(self, scores: Scores) -> bool:
        """Has it made more of the scores than there were?"""
        return self.shape.numel() != prod(scores.lead) * scores.q.shape[-2] * scores.k.shape[-2]


def is_in_place(name: str) -> bool:
    """Does a function of this name change the tensor it is given?"""
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))


OpRule = Callable[[OpCall], "SymbolicValue | None"]


def _scaled(call: OpCall) -> SymbolicValue | None:
    factor, note, x = call.argument(1, "other"), call.note(), call.argument(0)
    if note is None and call.name in ("mul", "multiply"):  # a number times scores, or values times weights
        factor, note, x = x, call.note(1), factor
    if isinstance(note, SoftmaxOutput):
        weighed = WeightedValues.of(note, x, factor) if call.name in ("mul", "multiply") else None
        return _weighed(call, note) if weighed is None else weighed
    if note is None or "rounding_mode" in call.kwargs or call.spreads(note):
        return None
    divides = call.name not in ("mul", "mul_", "multiply")
    if (number := _number(factor)) is not None:
        number = number and (1 / number if divides else number)
        return note.times(number, call.lead) if number and (number > FADES or not note.hidden) else None
    if isinstance(factor, Tensor) and factor.ndim and factor.shape[-1] == 1:
        return note.times(1 / factor if divides else factor, call.lead)
    return note.gated(factor, call.lead) if isinstance(factor, Tensor) and factor.ndim and not divides else None


def _added(call: OpCall) -> SymbolicValue | None:
    other, note = call.argument(1, "other"), call.note()
    takes, alpha = call.name in ("sub", "sub_", "subtract"), call.kwargs.get("alpha", 1)
    if isinstance(
        sunk := call.symbolic.get(call.argument(0), written=call.name.endswith("_")), ScoresWithSink
    ):  # one number a row
        by_row = isinstance(other, Tensor) and other.ndim and other.shape[-1] == 1
        return replace(sunk, shifted=True) if by_row else None
    if not isinstance(note, Scores) and call.name == "add" and alpha == 1:  # add_ has written over the other
        other, note = call.argument(0), call.note(1)
    if not isinstance(note, Scores) or other is None or call.spreads(note):
        return None
    if not isinstance(other, Tensor) or other.ndim == 0:
        return note
    factor = -alpha if takes else alpha
    return note.plus(other if factor == 1 else other * factor, call.lead)


def _filled(call: OpCall) -> Scores | SoftmaxOutput | None:
    return _hidden(call, call.note(), call.argument(1, "mask"), call.argument(2, "value"))


def _chosen(call: OpCall) -> Scores | SoftmaxOutput | None:
    shown, x, y = call.argument(0, "condition"), call.argument(1, "input"), call.argument(2, "other")
    if isinstance(x, Tensor) and x.dtype == torch.bool:  # of a tensor, x.where(shown, y)
        shown, x = x, shown
    if (note := call.symbolic.get(x)) is not None:
        return _hidden(call, note, ~shown, y)
    return _hidden(call, call.symbolic.get(y), shown, x)


def _hidden(call: OpCall, note: SymbolicValue | None, where: Any, value: Any) -> Scores | SoftmaxOutput | None:
    if not isinstance(note, (Scores, SoftmaxOutput)) or not isinstance(where, Tensor) or where.dtype != torch.bool:
        return None
    if (number := _number(value)) is None:
        return None
    if isinstance(note, Scores):
        if call.spreads(note) or (call.name == "__setitem__" and where.ndim != len(call.shape)):
            return None
        return note.without(where, call.lead, by=number) if number <= MAX_HIDDEN_SCORE else None
    return _weighed(call, note) if number == 0 and call.name != "__setitem__" else None


def _weighed(call: OpCall, note: SoftmaxOutput) -> SoftmaxOutput | None:
    """Other weights of the same scores: whether they are still the softmax of these will be seen."""
    return replace(note, found=None, reweighed=True) if call.out.numel() == note.logits.numel() else None


def _bounded(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Scores may be kept within bounds that they do not reach."""
    note, low, high = call.note(), call.argument(1, "other", "min"), call.argument(2, "max")
    if not isinstance(note, Scores) or not isinstance(call.out, Tensor) or call.spreads(note):
        return None
    least, most = -inf if low is None else _number(low), inf if high is None else _number(high)
    if least is None or most is None or least > MAX_HIDDEN_SCORE or most < -MAX_HIDDEN_SCORE:
        return None
    return note if low is None else replace(note, finite=True)


def _same(call: OpCall) -> SymbolicValue | None:
    if isinstance(sunk := call.symbolic.get(call.argument(0)), ScoresWithSink):
        return sunk if call.result.is_floating_point() else None
    return call.note() if call.result.is_floating_point() else None


def _joined(call: OpCall) -> ScoresWithSink | None:
    """Scores beside one more column of logits."""
    parts, dim = call.argument(0, "tensors"), call.argument(1, "dim", "axis", default=0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-1, call.out.ndim - 1):
        return None
    for last, (x, other) in enumerate((reversed(parts), parts)):
        if isinstance(note := call.symbolic.get(x), Scores) and other.shape == (*x.shape[:-1], 1):
            return ScoresWithSink.of(note, call.out, last=bool(last)) if note.zeroed is None else None
    return None


def _padded(call: OpCall) -> ScoresWithSink | None:
    """The same by one number for all of the column."""
    note, pad = call.symbolic.get(call.argument(0, "input")), tuple(call.argument(1, "pad"))
    plain = call.argument(2, "mode", default="constant") == "constant" and pad in ((0, 1), (1, 0))
    if not plain or not isinstance(note, Scores) or note.zeroed is not None:
        return None
    return ScoresWithSink.of(note, call.out, last=pad == (0, 1))


def _left(call: OpCall) -> Scores | SoftmaxOutput | None:
    """What may be done to weights and is no part of them."""
    note = call.note()
    return note if isinstance(note, SoftmaxOutput) else None


def _reshaped(call: OpCall) -> Scores | SoftmaxOutput | None:
    note, before, after = call.note(), call.args[0].shape if call.args else (), call.out.shape
    if note is None or (isinstance(note, SoftmaxOutput) and note.sunk is not None and before[-2:] != after[-2:]):
        return None
    if isinstance(note, SoftmaxOutput) and note.behind:
        if after == (*before, 1) or before == (*after, 1):
            return replace(note, behind=note.behind + len(after) - len(before))
        return note if note.behind == 1 and before[-2:] == after[-2:] else None
    if before[-2:] == after[-2:]:
        finer = isinstance(note, Scores) and len(after) - 2 > len(note.lead) and prod(note.lead) == prod(after[:-2])
        return note.with_batch_dims(after[:-2]) if isinstance(note, Scores) and finer else note
    if isinstance(note, Scores):
        return None
    if after == (*before, 1):
        return replace(note, behind=1)
    return note if before[-1:] == after[-1:] else None


def _indexed(call: OpCall) -> Scores | SoftmaxOutput | None:
    """By nothing but `:`, `...` and `None`, which is a reshape; or such that weights are left without their sink."""
    index = call.argument(1)
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(note := call.note(), SoftmaxOutput) and (sunk := note.sunk) is not None and note.found is not None:
        left = sunk.keys(call.args[0])
        same = left.shape == call.out.shape and left.data_ptr() == call.out.data_ptr()
        return replace(note, found=sunk.keys(note.found), sunk=None) if same else None
    plain = all(x is None or x is Ellipsis or (isinstance(x, slice) and x == slice(None)) for x in index)
    return _reshaped(call) if plain else None


def _expanded(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Weights as often as values have features."""
    note = call.note()
    wide = isinstance(note, SoftmaxOutput) and note.behind and call.args[0].shape[:-1] == call.out.shape[:-1]
    return note if wide else None


def _turned(call: OpCall) -> Scores | SoftmaxOutput | None:
    note = call.note()
    if note is None or call.args[0].ndim < 2:
        return None
    if isinstance(note, SoftmaxOutput) and (note.behind > 1 or note.sunk is not None):
        return None
    shape = call.args[0].shape
    *lead, row, column = _order(call, len(shape))
    if {row, column} != {len(shape) - 2, len(shape) - 1}:
        return None
    if lead != sorted(lead):
        flipped = isinstance(note, SoftmaxOutput) and note.behind
        note = note.permute_batch_dims(call.args[0].mT.shape if flipped else shape, lead)
    if row < column:
        return note
    return note.mT if isinstance(note, Scores) else replace(note, behind=1 - note.behind)


def _order(call: OpCall, ndim: int) -> list[int]:
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


def _softmax(call: OpCall) -> SoftmaxOutput | None:
    return _softmaxed(call, call.argument(0, "input"), call.argument(1, "dim"))


def _drawn(call: OpCall) -> SoftmaxOutput | None:
    """Weights by a softmax of scores and of noise: no softmax of the scores, as will be seen."""
    found = _softmaxed(call, call.argument(0, "logits"), call.argument(4, "dim", default=-1))
    return None if found is None else replace(found, reweighed=True)


def _softmaxed(call: OpCall, x: Any, dim: Any) -> SoftmaxOutput | None:
    if not isinstance(dim, int) or not has_data(x) or not x.ndim:
        return None
    behind = x.ndim - 1 - dim % x.ndim
    scores = call.symbolic.get(x)
    if isinstance(scores, ScoresWithSink):
        return None if behind else scores.softmaxed(x)
    scores = scores if isinstance(scores, Scores) and scores.zeroed is None and behind < 2 else None
    if behind:
        return SoftmaxOutput(None if scores is None else scores.mT, x.movedim(dim, -1), behind)
    return SoftmaxOutput(scores, x, 0, is_gate=call.symbolic.linear_output() is x)


OP_RULES: dict[str, OpRule] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"), _scaled),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract"), _added),
    **dict.fromkeys(("masked_fill", "masked_fill_", "__setitem__"), _filled),
    "where": _chosen,
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_", "clip"), _bounded),
    **dict.fromkeys(("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"), _same),
    **dict.fromkeys(("dropout", "dropout_", "nan_to_num", "nan_to_num_"), _left),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    "__getitem__": _indexed,
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined),
    "pad": _padded,
    **dict.fromkeys(("expand", "expand_as"), _expanded),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "mT", "T", "t"), _turned),
    SOFTMAX: _softmax,
    "gumbel_softmax": _drawn,
}


def _number(x: Any) -> float | None:
    """A number, or the only one of a tensor."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, (int, float)) else None
