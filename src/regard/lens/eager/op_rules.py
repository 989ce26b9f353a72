"""Rules that update symbolic attention scores, and the softmax of them, after each torch function.

What
    `OP_RULES` has one rule per name of a torch function (mul, add, masked_fill, softmax, view, ...). A rule gets the
    call after it ran, as an `OpCall`, and returns the `SymbolicValue` of the result: `Scores`, `ScoresWithSink`,
    `Exponentials`, `SoftmaxOutput` or `WeightedValues`. None means that the result has no symbolic value, so tracking
    ends there.

How it flows
    The tracker adds the result of q @ k.mT to `SymbolicTensors` as `Scores`. For each later call whose name is in
    `OP_RULES` it applies the rule, which reads the symbolic values of the arguments, and adds what the rule returns.
    The product of a `SoftmaxOutput` with values is an attention; the tracker handles products itself.

Lifetimes
    `SymbolicTensors` refers to tensors weakly and notes their version counter: an entry disappears with its tensor, and
    is invalid once the tensor was written to in place, unless a rule followed that write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.terms.normalizers import Normalizer, Sigmoid
from ..recording.store import version_of
from ..terms.rectified import Rectified
from .dim_origins import dim_order
from .final_weights import CREATING_NAMES, LAYOUT_NAMES, describe, is_active_dropout
from .matmul import has_data
from .symbolic_scores import MAX_HIDDEN_SCORE, Scores, ScoresWithSink, SoftmaxOutput, WeightedValues
from .unnormalized import Exponentials, UndividedAverage

MIN_FACTOR_OF_HIDDEN = 1e-2  # a finite fill value times a smaller factor may no longer hide its key

SOFTMAX = "softmax"
SOFTMAX_NAMES = frozenset((SOFTMAX, "special_softmax", "softmin"))
EXP_NAMES = frozenset(("exp", "exp_"))
NOT_ELEMENTWISE = CREATING_NAMES | LAYOUT_NAMES

SymbolicValue = Scores | ScoresWithSink | Exponentials | UndividedAverage | SoftmaxOutput | WeightedValues


class SymbolicTensors:
    """The symbolic values of live tensors; an in-place write to a tensor invalidates its value."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], int | None, SymbolicValue]] = {}
        self.weights: set[int] = set()  # keys of the entries that are the output of a softmax

    def get(self, x: Any, *, written: bool = False) -> SymbolicValue | None:
        """Return the value of a tensor; None if it has none, or if the tensor was written to since.

        With `written` one write is allowed, that of the in-place call which has just run.
        """
        entry = self.entries.get(id(x))
        if entry is None or (tensor := entry[0]()) is None or tensor is not x:
            return None
        version, known_version = version_of(tensor), entry[1]
        has_one_write = written and version is not None and known_version == version - 1
        return entry[2] if known_version == version or has_one_write else None

    def add(self, x: Tensor, value: SymbolicValue) -> None:
        """Set the value of a tensor."""
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (entry := self.entries.get(key)) is not None and entry[0] is ref:
                self._remove(key)

        self.entries[key] = weakref.ref(x, forget), version_of(x), value
        if isinstance(value, SoftmaxOutput):
            self.weights.add(key)
        else:
            self.weights.discard(key)

    def forget(self, x: Any) -> None:
        """Remove a tensor that was written to; in inference mode, where versions are not counted, also its views."""
        self._remove(id(x))
        if isinstance(x, Tensor) and x.is_inference():
            memory = x.untyped_storage().data_ptr()
            for key, (ref, _, _) in list(self.entries.items()):
                if (tensor := ref()) is None or tensor.untyped_storage().data_ptr() == memory:
                    self._remove(key)

    def forget_softmax(self, recorded: SoftmaxOutput) -> None:
        """Remove a softmax that was recorded: in training, autograd keeps its tensors until the backward pass."""
        for key, (_, _, value) in list(self.entries.items()):
            output = value.softmaxed if isinstance(value, WeightedValues) else value
            if isinstance(output, SoftmaxOutput) and output.averaged is recorded.averaged:
                self._remove(key)

    def clear(self) -> None:
        """Remove everything."""
        self.entries.clear()
        self.weights.clear()

    def _remove(self, key: int) -> None:
        self.entries.pop(key, None)
        self.weights.discard(key)


class OpCall(NamedTuple):
    """One call of a torch function, after it ran, whose arguments may have symbolic values."""

    symbolic: SymbolicTensors
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any

    def symbolic_argument(self, at: int = 0) -> Scores | SoftmaxOutput | None:
        """Return the scores, or the softmax output, that an argument is."""
        value = self.symbolic.get(x := self.argument(at), written=self.name.endswith("_"))
        if isinstance(value, SoftmaxOutput) and x is not self.out:
            return replace(value, weights=value.weights_in(x))
        return value if isinstance(value, (Scores, SoftmaxOutput)) else None

    def argument(self, at: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position or by one of its names."""
        if len(self.args) > at:
            return self.args[at]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def lead(self) -> torch.Size:
        """The batch dims of the result."""
        return self.shape[:-2]

    @property
    def result(self) -> Tensor:
        """The result; `__setitem__`, which returns None, changed its first argument."""
        return self.args[0] if self.out is None else self.out

    @property
    def shape(self) -> torch.Size:
        """The shape of the result."""
        return self.result.shape

    def broadcasts(self, scores: Scores) -> bool:
        """Whether the result has more elements than the scores."""
        return self.shape.numel() != prod(scores.lead) * scores.q.shape[-2] * scores.k.shape[-2]


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))


OpRule = Callable[[OpCall], "SymbolicValue | None"]


def _multiply(call: OpCall) -> SymbolicValue | None:
    """Multiply or divide scores by a factor, or multiply values by weights."""
    factor, value, x = call.argument(1, "other"), call.symbolic_argument(), call.argument(0)
    if value is None and call.name in ("mul", "multiply"):  # factor * scores, or values * weights
        factor, value, x = x, call.symbolic_argument(1), factor
    if value is None:
        return _divide_exponentials(call)
    if isinstance(value, SoftmaxOutput):
        weighted = WeightedValues.of(value, x, factor) if call.name in ("mul", "multiply") else None
        return _reweigh_elementwise(call, value, factor) if weighted is None else weighted
    if value is None or "rounding_mode" in call.kwargs or call.broadcasts(value):
        return None
    divides = call.name not in ("mul", "mul_", "multiply")
    if (number := _number(factor)) is not None:
        number = number and (1 / number if divides else number)
        keeps_hidden = number > MIN_FACTOR_OF_HIDDEN or not value.hidden
        return value.times(number, call.lead) if number and keeps_hidden else None
    if isinstance(factor, Tensor) and factor.ndim and factor.shape[-1] == 1:
        return value.times(1 / factor if divides else factor, call.lead)
    return (
        value.times_zero_or_one(factor, call.lead)
        if isinstance(factor, Tensor) and factor.ndim and not divides
        else None
    )


def _add(call: OpCall) -> SymbolicValue | None:
    """Add to scores, or subtract from them."""
    other, value = call.argument(1, "other"), call.symbolic_argument()
    subtracts, alpha = call.name in ("sub", "sub_", "subtract"), call.kwargs.get("alpha", 1)
    with_sink = call.symbolic.get(call.argument(0), written=call.name.endswith("_"))
    if isinstance(with_sink, ScoresWithSink):
        # One number per row, such as the row's maximum, changes no weights.
        is_per_row = isinstance(other, Tensor) and other.ndim and other.shape[-1] == 1
        return replace(with_sink, shifted=True) if is_per_row else None
    if not isinstance(value, Scores) and call.name == "add" and alpha == 1:  # not add_, which overwrote its argument
        other, value = call.argument(0), call.symbolic_argument(1)
    if not isinstance(value, Scores) or other is None or call.broadcasts(value):
        return None
    factor = -alpha if subtracts else alpha
    if not isinstance(other, Tensor) or other.ndim == 0:
        return value.plus_number(other * factor)
    return value.plus(other if factor == 1 else other * factor, call.lead)


def _fill(call: OpCall) -> SymbolicValue | None:
    """Hide keys by `masked_fill`, or by assignment to x[mask]."""
    value = call.symbolic.get(call.argument(0), written=is_in_place(call.name))
    return _hide(call, value, call.argument(1, "mask"), call.argument(2, "value"))


def _where(call: OpCall) -> SymbolicValue | None:
    """Hide keys by `torch.where(visible, scores, number)` or `torch.where(hidden, number, scores)`."""
    condition, x, y = call.argument(0, "condition"), call.argument(1, "input"), call.argument(2, "other")
    if isinstance(x, Tensor) and x.dtype == torch.bool:  # the method, x.where(condition, y)
        condition, x = x, condition
    if (value := call.symbolic.get(x)) is not None:
        return _hide(call, value, ~condition, y)
    return _hide(call, call.symbolic.get(y), condition, x)


def _hide(call: OpCall, value: SymbolicValue | None, where: Any, fill: Any) -> SymbolicValue | None:
    """Hide the scores that were filled with a large negative number, or weights that were filled with 0."""
    if not isinstance(value, (Scores, Exponentials, SoftmaxOutput)):
        return None
    if not isinstance(where, Tensor) or where.dtype != torch.bool or (number := _number(fill)) is None:
        return None
    if isinstance(value, Exponentials):
        return value.without(where, call.lead) if number == 0 and call.name != "__setitem__" else None
    if isinstance(value, Scores):
        if call.broadcasts(value) or (call.name == "__setitem__" and where.ndim != len(call.shape)):
            return None
        return value.without(where, call.lead, by=number) if number <= MAX_HIDDEN_SCORE else None
    if number or call.name == "__setitem__":
        return None
    return _hide_elementwise(value, where, call.lead) or _reweigh(call, value)


def _hide_elementwise(value: SoftmaxOutput, hidden: Tensor, lead: torch.Size) -> SoftmaxOutput | None:
    """Hide keys whose weights were set to 0; None if other weights of the row depend on their scores."""
    if not value.is_elementwise or value.scores is None or value.behind:
        return None
    scores = value.scores.without(hidden, lead, by=-inf)
    return replace(value, scores=scores, logits=value.logits.masked_fill(hidden, -inf), weights=None)


def _reweigh_elementwise(call: OpCall, value: SoftmaxOutput, factor: Any) -> SoftmaxOutput | None:
    """Multiply weights, or divide them: exactly if each weight is a function of its own score."""
    divides = call.name not in ("mul", "mul_", "multiply")
    if isinstance(value.normalize, Rectified):
        if factor is call.argument(0) and not divides:
            return replace(value, normalize=value.normalize.raise_to(2.0), weights=None)
        if (number := _number(factor)) is not None and number > 0:
            return replace(value, normalize=value.normalize.times(1 / number if divides else number), weights=None)
    is_mask = value.is_elementwise and isinstance(factor, Tensor) and not divides and _is_zero_or_one(factor)
    hidden = _hide_elementwise(value, factor == 0, call.lead) if is_mask else None
    return _reweigh(call, value) if hidden is None else hidden


def _is_zero_or_one(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _divide_exponentials(call: OpCall) -> SymbolicValue | None:
    """Divide exponentials by one number per row, multiply them by its inverse, or by 0 where keys are hidden."""
    divides = call.name not in ("mul", "mul_", "multiply")
    e, other = call.argument(0), call.argument(1, "other")
    value = call.symbolic.get(e, written=is_in_place(call.name))
    if not isinstance(value, Exponentials) and not divides:
        e, other, value = other, e, call.symbolic.get(other)
    if not isinstance(value, Exponentials) or not isinstance(other, Tensor) or not other.ndim:
        return None
    if not divides and (other.dtype == torch.bool or (other.shape[-1] > 1 and _is_zero_or_one(other))):
        return value.without(other == 0, call.lead)
    divisor = other if divides else 1 / other
    before = call.result * divisor if is_in_place(call.name) else e
    return value.divide(before, divisor) if before.shape == call.shape else None


def _reweigh(call: OpCall, value: SoftmaxOutput) -> SoftmaxOutput | None:
    """Note a change after the softmax: the tracker later compares all rows with the softmax."""
    return _note_change(call, value) if call.out.numel() == value.logits.numel() else None


def change_weights(call: OpCall) -> SoftmaxOutput | None:
    """Note a change by a function without a rule, if the result has the shape of the weights of one softmax."""
    arguments = (*call.args, *call.kwargs.values())
    values = [(x, value) for x in arguments if isinstance(value := _value_of(call, x), SoftmaxOutput)]
    if len(values) != 1 or not isinstance(call.result, Tensor) or call.name in NOT_ELEMENTWISE:
        return None
    (x, value), result = values[0], call.result
    fits = result.shape == x.shape and x.numel() == value.logits.numel() and result.is_floating_point()
    can_change = (value.is_attention or value.is_elementwise) and value.with_sink is None
    return _note_change(call, value) if fits and can_change else None


def _value_of(call: OpCall, x: Any) -> SymbolicValue | None:
    return call.symbolic.get(x, written=is_in_place(call.name)) if isinstance(x, Tensor) else None


def _note_change(call: OpCall, value: SoftmaxOutput) -> SoftmaxOutput:
    changes = ("dropped out",) * value.is_dropped + (describe(call.name, call.args, call.kwargs),)
    changes = tuple(dict.fromkeys((*value.changes, *filter(None, changes))))
    return replace(value, weights=None, is_dropped=False, changes=changes)


def _clamp(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Clamp scores to bounds that no visible score reaches; a clamp at 0 is a ReLU."""
    value, low, high = call.symbolic_argument(), call.argument(1, "other", "min"), call.argument(2, "max")
    if high is None and isinstance(low, (int, float)) and low == 0:
        return _relu(call)
    if not isinstance(value, Scores) or not isinstance(call.out, Tensor) or call.broadcasts(value):
        return None
    least, most = -inf if low is None else _number(low), inf if high is None else _number(high)
    if least is None or most is None or least > MAX_HIDDEN_SCORE or most < -MAX_HIDDEN_SCORE:
        return None
    return value if low is None else replace(value, finite=True)


def _copy(call: OpCall) -> SymbolicValue | None:
    """Copy, cast or move a tensor to another device."""
    if isinstance(value := call.symbolic.get(call.argument(0)), (ScoresWithSink, Exponentials)):
        return value if call.result.is_floating_point() else None
    return call.symbolic_argument() if call.result.is_floating_point() else None


def _concatenate_sink(call: OpCall) -> ScoresWithSink | None:
    """Concatenate scores and one column of logits, an attention sink."""
    parts, dim = call.argument(0, "tensors"), call.argument(1, "dim", "axis", default=0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-1, call.out.ndim - 1):
        return None
    for is_last, (x, other) in enumerate((reversed(parts), parts)):
        if isinstance(scores := call.symbolic.get(x), Scores) and other.shape == (*x.shape[:-1], 1):
            return ScoresWithSink.of(scores, call.out, last=bool(is_last)) if scores.zeroed is None else None
    return None


def _pad_with_sink(call: OpCall) -> ScoresWithSink | None:
    """Add a sink column of one constant by `F.pad`."""
    scores, pad = call.symbolic.get(call.argument(0, "input")), tuple(call.argument(1, "pad"))
    adds_column = call.argument(2, "mode", default="constant") == "constant" and pad in ((0, 1), (1, 0))
    if not adds_column or not isinstance(scores, Scores) or scores.zeroed is not None:
        return None
    return ScoresWithSink.of(scores, call.out, last=pad == (0, 1))


def _keep_weights(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Pass weights through ops that do not count as part of them: dropout and nan_to_num."""
    value = call.symbolic_argument()
    if not isinstance(value, SoftmaxOutput):
        return None
    drops = call.name.startswith("dropout") and is_active_dropout(call.args, call.kwargs)
    return replace(value, is_dropped=value.is_dropped or drops)


def _reshape(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Reshape batch dims, or add a dim of 1 behind the keys of weights."""
    value, before, after = call.symbolic_argument(), call.args[0].shape if call.args else (), call.out.shape
    if value is None:
        return None
    if isinstance(value, SoftmaxOutput) and value.with_sink is not None and before[-2:] != after[-2:]:
        return None
    if isinstance(value, SoftmaxOutput) and value.behind:
        if after == (*before, 1) or before == (*after, 1):
            return replace(value, behind=value.behind + len(after) - len(before))
        return value if value.behind == 1 and before[-2:] == after[-2:] else None
    if before[-2:] == after[-2:]:
        if not isinstance(value, Scores):
            return value
        splits_dims = len(after) - 2 > len(value.lead) and prod(value.lead) == prod(after[:-2])
        return value.with_batch_dims(after[:-2]) if splits_dims else value
    if isinstance(value, Scores):
        return None
    if after == (*before, 1):
        return replace(value, behind=1)
    return value if before[-1:] == after[-1:] else None


def _index(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Index by `:`, `...` and `None` only, which is a reshape; or by a slice that removes the sink's weight."""
    index = call.argument(1)
    index = index if isinstance(index, tuple) else (index,)
    value = call.symbolic_argument()
    if isinstance(value, SoftmaxOutput) and (with_sink := value.with_sink) is not None and value.weights is not None:
        keys = with_sink.keys(call.args[0])
        removes_sink = keys.shape == call.out.shape and keys.data_ptr() == call.out.data_ptr()
        return replace(value, weights=with_sink.keys(value.weights), with_sink=None) if removes_sink else None
    is_reshape = all(x is None or x is Ellipsis or (isinstance(x, slice) and x == slice(None)) for x in index)
    return _reshape(call) if is_reshape else None


def _expand(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Expand weights (..., keys, 1) along the features of the values."""
    value = call.symbolic_argument()
    is_along_features = (
        isinstance(value, SoftmaxOutput) and value.behind and call.args[0].shape[:-1] == call.out.shape[:-1]
    )
    return value if is_along_features else None


def _permute(call: OpCall) -> Scores | SoftmaxOutput | None:
    """Permute batch dims, or swap queries and keys."""
    value = call.symbolic_argument()
    if value is None or call.args[0].ndim < 2:
        return None
    if isinstance(value, SoftmaxOutput) and (value.behind > 1 or value.with_sink is not None):
        return None
    shape = call.args[0].shape
    *lead, row, column = dim_order(call.name, call.args, call.kwargs, len(shape))
    if {row, column} != {len(shape) - 2, len(shape) - 1}:
        return None
    if lead != sorted(lead):
        is_transposed = isinstance(value, SoftmaxOutput) and value.behind
        value = value.permute_batch_dims(call.args[0].mT.shape if is_transposed else shape, lead)
    if row < column:
        return value
    return value.mT if isinstance(value, Scores) else replace(value, behind=1 - value.behind)


def _softmax(call: OpCall) -> SoftmaxOutput | None:
    """Apply the softmax to scores, or to a tensor that is not known to be scores."""
    return _softmax_of(call, call.argument(0, "input"), call.argument(1, "dim"))


def _gumbel_softmax(call: OpCall) -> SoftmaxOutput | None:
    """Apply the softmax to scores plus noise; marked as changed, since it is not the softmax of the scores."""
    output = _softmax_of(call, call.argument(0, "logits"), call.argument(4, "dim", default=-1))
    return None if output is None else replace(output, changes=(describe(call.name, (), {}),))


def _softmin(call: OpCall) -> SoftmaxOutput | None:
    """Apply the softmax to the negative scores."""
    x = call.argument(0, "input")
    output = _softmax_of(call, x, call.argument(1, "dim"))
    if output is None:
        return None
    scores = output.scores
    scores = None if scores is None or scores.hidden else scores.times(-1.0, call.lead)
    return replace(output, scores=scores, logits=-output.logits)


def _log_softmax(call: OpCall) -> Scores | None:
    """Subtract the log-sum-exp from scores: the exponentials of the result are a softmax."""
    x, dim, scores = call.argument(0, "input"), call.argument(1, "dim"), call.symbolic_argument()
    if not isinstance(scores, Scores) or not isinstance(dim, int) or dim % x.ndim < x.ndim - 2:
        return None
    return scores.plus(-x.logsumexp(dim, keepdim=True), call.lead)


def _exp(call: OpCall) -> Exponentials | SoftmaxOutput | None:
    """Take the exponentials of scores, or of a tensor that is not known to be scores."""
    x, e = call.argument(0, "input"), call.result
    if not e.is_floating_point() or e.ndim < 2 or not has_data(e):
        return None
    scores = call.symbolic_argument()
    if not isinstance(scores, Scores) or scores.zeroed is not None:
        return Exponentials(None)
    exponentials = Exponentials(scores, None if x is e else x)
    return exponentials.as_weights(e) or exponentials


def _normalize(call: OpCall) -> SoftmaxOutput | None:
    """Divide exponentials by their sums with `F.normalize`."""
    e, p, dim = call.argument(0, "input"), call.argument(1, "p", default=2.0), call.argument(2, "dim", default=1)
    value = call.symbolic.get(e)
    return value.divide(e, e.sum(dim, keepdim=True)) if isinstance(value, Exponentials) and p == 1 else None


def _sigmoid(call: OpCall) -> SoftmaxOutput | None:
    """Apply a sigmoid to each score."""
    return _elementwise(call, lambda bias: Sigmoid(bias), Sigmoid())


def _relu(call: OpCall) -> SoftmaxOutput | None:
    """Set negative scores to 0."""
    if call.name.startswith("clamp") and call.argument(1, "min") != 0:
        return None
    return _elementwise(call, None, Rectified())


def _elementwise(
    call: OpCall, with_bias: Callable[[float], Normalizer] | None, plain: Normalizer
) -> SoftmaxOutput | None:
    """Return weights that are a function of their own scores; numbers added to a row become a bias or part of q, k."""
    scores, x = call.symbolic_argument(), call.argument(0, "input")
    if not isinstance(scores, Scores) or scores.zeroed is not None:
        return None
    if is_in_place(call.name):
        x = call.result.logit() if isinstance(plain, Sigmoid) else call.result.clone()
    shift = scores.shift
    if isinstance(shift, Tensor) and shift.numel() == 1:
        shift = float(shift)
    if with_bias is not None and not isinstance(shift, Tensor) and shift:
        return SoftmaxOutput(replace(scores, shift=0.0), x - shift, 0, normalize=with_bias(shift))
    scores = scores.with_row_shift(shift) if isinstance(shift, Tensor) or shift else scores
    return SoftmaxOutput(scores, x, 0, normalize=plain)


def _negate(call: OpCall) -> Scores | None:
    """Change the sign of scores."""
    value = call.symbolic_argument()
    return value.times(-1.0, call.lead) if isinstance(value, Scores) and not value.hidden else None


def _triangle(call: OpCall) -> SymbolicValue | None:
    """Set weights above or below a diagonal to 0."""
    x, diagonal = call.argument(0, "input"), call.argument(1, "diagonal", default=0)
    value = call.symbolic.get(x, written=is_in_place(call.name))
    kept = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    kept = kept.tril(diagonal) if call.name.startswith("tril") else kept.triu(diagonal)
    return _hide(call, value, ~kept, 0.0)


def _power(call: OpCall) -> SoftmaxOutput | None:
    """Raise ReLU weights to a power."""
    value, power = call.symbolic_argument(), call.argument(1, "exponent", default=2.0)
    if not isinstance(value, SoftmaxOutput) or not isinstance(power, (int, float)) or power <= 0:
        return None
    if not isinstance(value.normalize, Rectified):
        return _reweigh(call, value)
    return replace(value, normalize=value.normalize.raise_to(float(power)), weights=None)


def _softmax_of(call: OpCall, x: Any, dim: Any) -> SoftmaxOutput | None:
    """Return the symbolic softmax of x over a dim."""
    if not isinstance(dim, int) or not has_data(x) or not x.ndim:
        return None
    behind = x.ndim - 1 - dim % x.ndim
    scores = call.symbolic.get(x)
    if isinstance(scores, ScoresWithSink):
        return None if behind else scores.softmax_output(x)
    scores = scores if isinstance(scores, Scores) and behind < 2 else None
    if behind:
        return SoftmaxOutput(None if scores is None else scores.mT, x.movedim(dim, -1), behind)
    return SoftmaxOutput(scores, x, 0)


OP_RULES: dict[str, OpRule] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"), _multiply),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract"), _add),
    **dict.fromkeys(("masked_fill", "masked_fill_", "__setitem__"), _fill),
    "where": _where,
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_", "clip"), _clamp),
    **dict.fromkeys(
        ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone", "detach"), _copy
    ),
    **dict.fromkeys(("dropout", "dropout_", "nan_to_num", "nan_to_num_"), _keep_weights),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape),
    "__getitem__": _index,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate_sink),
    "pad": _pad_with_sink,
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "mT", "T", "t"), _permute),
    **dict.fromkeys(SOFTMAX_NAMES - {"softmin"}, _softmax),
    "softmin": _softmin,
    **dict.fromkeys(("neg", "neg_", "negative", "negative_"), _negate),
    **dict.fromkeys(("tril", "tril_", "triu", "triu_"), _triangle),
    **dict.fromkeys(("log_softmax", "special_log_softmax"), _log_softmax),
    **dict.fromkeys(EXP_NAMES, _exp),
    "normalize": _normalize,
    **dict.fromkeys(("sigmoid", "sigmoid_", "special_expit"), _sigmoid),
    **dict.fromkeys(("relu", "relu_", "clamp_min", "clamp_min_"), _relu),
    **dict.fromkeys(("pow", "pow_", "square", "square_"), _power),
    "gumbel_softmax": _gumbel_softmax,
}


def _number(x: Any) -> float | None:
    """Return a number, or the number in a tensor of one element; None for anything else."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, (int, float)) else None
