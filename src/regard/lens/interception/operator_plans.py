"""OperatorPlan: record a run whose kind was planned before, by the few operators that its attentions consist of.

What
    A plan by functions (`layer_plans.py`) needs a function mode, which takes a small layer longer than its own work. A
    run that fitted such a plan is known by its operators too: products, softmaxes and kernels. Later runs of the same
    module class, code, attributes and inputs are only watched by the dispatcher (`operator_watch.py`), and each
    attention is recorded as soon as its last operator has run.

Proof
    The arguments of PyTorch's kernel are the proof by themselves: the tensors that it was given, of the same form in
    memory. Weights that a layer wrote out are compared with those of its queries and keys, as in every plan, and
    must be the very tensor that the layer multiplies with its values.

What it does not see
    Functions between these operators. What decides about them is compared before the run: the class with its functions,
    the attributes of the modules, the arguments. If the operators differ nevertheless, a call of PyTorch's kernel is
    read by itself; any other attention is left out and named, and the next run is analyzed in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from math import prod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..eager.dim_origins import DimOrigins, Origin, with_known_dims
from .layer_plans import (
    ENTERED,
    LEFT,
    PLAIN_TYPES,
    KeptView,
    KnownRuns,
    Op,
    Plan,
    PlannedAttention,
    RunLog,
    about_tensor,
    whole_of,
)
from .operator_watch import PRODUCTS, SDPA_OPERATOR, SOFTMAXES, operators_of

MAX_OPERATORS = 128  # operators of a run that is planned
MAX_FAILURES = 2  # runs that did otherwise, before their kind is planned by operators no more
MAX_ITEMS = 16  # items of a container that are compared
MAX_LAYOUTS = 1024  # sets of attributes that are remembered
PRODUCT_OPERATORS, SOFTMAX_OPERATORS = operators_of(PRODUCTS), operators_of(SOFTMAXES)
OTHERWISE = (
    "it ran otherwise than layers of its class and attributes that capture had analyzed; "
    "capture it once more, and it is analyzed in full"
)
READ_TYPES = (FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property, dict, tuple, list)
OWN = frozenset(vars(nn.Module())) - {"training"}  # attributes that every module has


class Step(NamedTuple):
    """An operator that a run is expected to call, or the call or return of a module within it."""

    what: Any
    names: tuple[str, ...]  # arguments that are passed by name
    types: tuple[type, ...]  # arguments, then the result
    plain: tuple[tuple[int, Any], ...]  # place within the step -> value of an argument that is no tensor
    same: tuple[tuple[int, int], ...]  # place within the step -> place in the run where the tensor stood before
    attention: PlannedAttention | None  # complete once the operator has run
    last: tuple[int, ...]  # places in the run that no later step looks at


class OperatorPlan(NamedTuple):
    """The operators of a run, and the origin of the dims of its result."""

    steps: tuple[Step, ...]
    origin: Origin | None
    has_plain_dims: bool  # do all operators take queries as b h i d, with no dims to be split or swapped?


class OperatorLog:
    """The operators of a run that is logged for a plan by functions too."""

    def __init__(self, key: Any, given: Sequence[Any]) -> None:
        self.key, self.given = key, given
        self.ops: list[Op] = []

    def plan(self, log: RunLog, plan: Plan, run: Sequence[Any], out: Any) -> OperatorPlan | None:
        """Return the plan by operators of a run that fitted a plan by functions; None if they do not decide it."""
        inputs = [x for x in self.given if isinstance(x, Tensor)]
        if not all(any(run[n] is x for x in inputs) for n in plan.given[0]):
            return None  # a tensor that the modules keep, such as a cache
        if not all(_holds_tensors(op[0], op[-1]) for op in log.ops if op[0] not in (ENTERED, LEFT)):
            return None  # the code may go by values
        if not isinstance(out, Tensor) or any(run[n] is not out for n, _, _ in plan.made):
            return None
        attentions = [self._found_in_operators(attention, run) for attention in plan.attentions]
        known = {at: attention for each in attentions if each is not None for at, attention in [each]}
        softmaxes = sum(op[0] in SOFTMAX_OPERATORS for op in self.ops)
        kernels = sum(op[0] is SDPA_OPERATOR for op in self.ops)
        written_out = sum(attention.written_out is not None for attention in known.values())
        others = [op for op in self.ops if not (op[0] in (ENTERED, LEFT) or _is_expected(op[0]))]
        if others or len(known) != len(plan.attentions) or len(self.ops) > MAX_OPERATORS:
            return None
        if softmaxes != written_out or kernels != len(known) - written_out:
            return None
        origin = with_known_dims(plan.made[0][2]) if plan.made else None
        values = [x for op in self.ops for x in _values(*op[1:])]
        is_plain = all(tuple(values[each.q.at].shape) == each.q.size for each in known.values())
        return OperatorPlan(self._steps(known), origin, is_plain)

    def _steps(self, attentions: Mapping[int, PlannedAttention]) -> tuple[Step, ...]:
        steps, places, at, read = list[Step](), dict[int, int](), 0, dict[int, int]()
        for n, op in enumerate(self.ops):
            values = _values(*op[1:])
            plain = tuple((m, x) for m, x in enumerate(values) if not isinstance(x, Tensor))
            same = tuple((m, places[id(x)]) for m, x in enumerate(values) if id(x) in places and isinstance(x, Tensor))
            attention = attentions.get(n)
            steps.append(Step(op[0], tuple(op[2] or ()), tuple(map(type, values)), plain, same, attention, ()))
            for m, x in enumerate(values):
                places.setdefault(id(x), at + m)
                read[at + m] = n
            read.update((before, n) for _, before in same)
            read.update((place, n) for place in (() if attention is None else attention.places))
            at += len(values)
        last: list[list[int]] = [[] for _ in steps]
        for place, n in read.items():
            last[n].append(place)
        return tuple(step._replace(last=tuple(each)) for step, each in zip(steps, last, strict=True))

    def _found_in_operators(
        self, attention: PlannedAttention, run: Sequence[Any]
    ) -> tuple[int, PlannedAttention] | None:
        """Return the number of the operator that completes an attention, and the attention by places in this log."""
        written_out = attention.written_out
        q, k = self._find(attention.q, run), self._find(attention.k, run)
        if q is None or k is None:
            return None
        first = max(q[0], k[0])
        if written_out is None:
            if q[0] != k[0] or self.ops[first][0] is not SDPA_OPERATOR:
                return None
            return first, attention._replace(q=q[1], k=k[1])
        weights = run[written_out.found.at]
        for n, op in enumerate(self.ops):
            if n > first and op[0] in PRODUCT_OPERATORS and any(x is weights for x in _values(*op[1:])[:-1]):
                found = self._place_of(weights, before=n)
                if found is None:
                    return None
                by_place = written_out._replace(
                    q=written_out.q._replace(at=q[1].at, whole=q[1].whole),
                    kT=written_out.kT._replace(at=k[1].at, whole=k[1].whole),
                    found=written_out.found._replace(at=found, whole=whole_of(weights)),
                    weights=written_out.weights._replace(at=found, whole=whole_of(weights)),
                )
                return n, attention._replace(q=q[1], k=k[1], written_out=by_place)
        return None

    def _find(self, view: KeptView, run: Sequence[Any]) -> tuple[int, KeptView] | None:
        """Return the first operator that takes the tensor of a view, and the view by its place in this log."""
        memory, at = run[view.at].untyped_storage().data_ptr(), 0
        for n, op in enumerate(self.ops):
            for m, x in enumerate(_values(*op[1:])):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == memory and _holds(x, view):
                    return n, view._replace(at=at + m, whole=whole_of(x))
            at += len(_values(*op[1:]))
        return None

    def _place_of(self, x: Tensor, before: int) -> int | None:
        """Return the place of a tensor among the results of softmaxes."""
        at = 0
        for op in self.ops[:before]:
            values = _values(*op[1:])
            at += len(values)
            if op[0] in SOFTMAX_OPERATORS and values[-1] is x:
                return at - 1
        return None


class OperatorRun:
    """A run under way that is recorded by its operators."""

    def __init__(
        self, runs: KnownRuns, key: Any, plan: OperatorPlan, parts: Sequence[nn.Module], *, within_mode: bool
    ) -> None:
        self.runs, self.key, self.plan, self.depth = runs, key, plan, len(parts)
        self.within_mode = within_mode  # was a mode on the stack that saw what the module around it calls?
        self.entered = [tuple(parts[-2:])]
        self.is_open = False  # did operators run that no attention has taken up?
        self.values: list[Any] = []  # arguments and results that are still needed, by their place in the run
        self._position = 0

    def enter(self, parts: Sequence[nn.Module], about: Any) -> bool:
        """Follow the call of a module within the run; return False if the plan has another step."""
        self.entered.append(tuple(parts[-2:]))
        return self._take(ENTERED, (*about, None), ()) is not None

    def leave(self) -> bool:
        """Follow the return of a module within the run; return False if the plan has another step."""
        return self._take(LEFT, (None,), ()) is not None

    def follow(self, what: Any, args: Any, kwargs: Any, out: Any) -> Step | None:
        """Follow an operator that has run; return its step, None if the plan has another."""
        self.is_open = True
        values = (*args, *kwargs.values(), out) if kwargs else (*args, out)
        if args and type(args[-1]) is list:
            values = _values(args, kwargs, out)
        return self._take(what, values, tuple(kwargs))

    def has_plain_dims(self, args: Sequence[Any]) -> bool:
        """Whether the queries and keys of a kernel that the plan does not know are b h i d, as those that it knows.

        Tensors of the known shape that lie otherwise in memory may have their dims swapped.
        """
        if not self.plan.has_plain_dims or any(x.ndim != 4 for x in args[:3]):
            return False
        attentions = [step.attention for step in self.plan.steps if step.attention is not None]
        known = [view for each in attentions for view in (each.q, each.k)]
        return not any(tuple(x.shape) == view.size and x.stride() != view.stride for x in args[:2] for view in known)

    def end_attention(self, step: Step) -> None:
        """Release the tensors of the attention that a step has completed."""
        self.is_open = False
        self._release(step)

    def end(self, origins: DimOrigins, out: Any) -> bool:
        """Return whether all operators were of known attentions; note the origin of the result of a whole run."""
        if self._position < len(self.plan.steps):
            return not self.is_open
        if self.plan.origin is not None and type(out) is Tensor and len(self.plan.origin.dims) == out.ndim:
            origins.add_known(out, self.plan.origin)
        return True

    def forget_plan(self) -> None:
        """Forget the plan: the run was not as it says."""
        self.runs.fail(self.key)

    def _take(self, what: Any, values: Sequence[Any], names: tuple[str, ...]) -> Step | None:
        steps, run = self.plan.steps, self.values
        if self._position == len(steps) or (step := steps[self._position]).what is not what:
            return None
        if tuple(map(type, values)) != step.types or names != step.names:
            return None
        for n, x in step.plain:
            if values[n] != x:
                return None
        for n, before in step.same:
            if values[n] is not run[before]:
                return None
        run += values
        self._position += 1
        if step.attention is None:
            self._release(step)
        return step

    def _release(self, step: Step) -> None:
        for place in step.last:
            self.values[place] = None


def _values(args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """Return the arguments and the result of an operator, with the tensors of a list, as `einsum` takes them."""
    if args and type(args[-1]) is list:
        args = (*args[:-1], *args[-1])
    return (*args, *kwargs.values(), out) if kwargs else (*args, out)


def _is_expected(operator: Any) -> bool:
    return operator is SDPA_OPERATOR or operator in PRODUCT_OPERATORS or operator in SOFTMAX_OPERATORS


def _holds_tensors(func: Any, out: Any) -> bool:
    return (
        func is Tensor.__len__
        or isinstance(out, Tensor)
        or (type(out) in (tuple, list) and all(isinstance(x, Tensor) for x in out))
    )


def _holds(x: Tensor, view: KeptView) -> bool:
    """Whether a tensor has the entries of a view of its memory, and no others."""
    ends = [sum((n - 1) * step for n, step in zip(*form, strict=True)) for form in ((x.shape, x.stride()), view[2:4])]
    return x.storage_offset() == view.offset and x.numel() == prod(view.size) and ends[0] == ends[1]


def key_of_run(parts: Sequence[nn.Module], classes: ClassFacts, given: Sequence[Any], origins: DimOrigins) -> Any:
    """Return what decides about a run: the modules that may attend in it, and its arguments; None if it is unknown."""
    found: list[Any] = [torch.is_inference_mode_enabled()]  # its tensors count no writes
    for n, x in enumerate(given):
        if isinstance(x, Tensor):
            same = next(m for m, y in enumerate(given) if y is x) if n else 0
            found.append((same, type(x), x.is_inference(), *about_tensor(x, origins)))
        elif type(x) in PLAIN_TYPES:
            found.append(x)
        else:
            return None
    return tuple(found), tuple([(classes[type(part)], *_facts_of(part)) for part in parts])


class _Layout(NamedTuple):
    """The attributes of a module by name and type, and how they are compared."""

    number: int
    plain: tuple[str, ...]  # their values are compared
    others: tuple[str, ...]  # what they hold is compared


def _facts_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the attributes that may decide what a module does, as far as they can be compared."""
    held = module.__dict__
    form = tuple(held), tuple(map(type, held.values()))
    if (layout := _LAYOUTS.get(form)) is None:
        layout = _layout_of(*form)
    number, plain, others = layout
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    return number, hooks, *map(held.__getitem__, plain), *[_fact(held[name]) for name in others]


def _layout_of(names: tuple[str, ...], kinds: tuple[type, ...]) -> _Layout:
    """Return the layout of a module from the names and types of its attributes."""
    own = [(name, kind) for name, kind in zip(names, kinds, strict=True) if name not in OWN]
    plain = tuple(name for name, kind in own if kind in PLAIN_TYPES)
    others = tuple(name for name, kind in own if kind in READ_TYPES or issubclass(kind, type))
    if len(_LAYOUTS) >= MAX_LAYOUTS:
        _LAYOUTS.clear()
    layout = _LAYOUTS[names, kinds] = _Layout(next(_COUNT), plain, others)
    return layout


def _fact(x: Any) -> Any:
    kind = type(x)
    if kind in PLAIN_TYPES:
        return kind, x
    if kind is FunctionType:
        return x.__code__, id(x)  # the function itself would keep its globals
    if kind in (MethodType, staticmethod, classmethod):
        return kind, _fact(x.__func__)
    if kind is property:
        return kind, _fact(x.fget)
    if issubclass(kind, type) or kind is BuiltinFunctionType:
        return x.__qualname__, id(x)
    if kind is dict and len(x) <= MAX_ITEMS:
        return kind, tuple([(name, _fact(each)) for name, each in x.items()])
    if kind in (tuple, list) and len(x) <= MAX_ITEMS:
        return kind, tuple(map(_fact, x))
    return kind


class ClassFacts(dict[type, int]):
    """A number for the code and attributes of each module class, read once per capture; another if they change."""

    def __missing__(self, kind: type) -> int:
        bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
        facts = _fact(kind), tuple([(name, _fact(x)) for base in bases for name, x in vars(base).items()])
        try:
            number = _NUMBERS.setdefault(facts, next(_COUNT))
        except TypeError:  # an attribute that cannot be compared
            number = next(_COUNT)
        self[kind] = number
        return number


_COUNT = count()
_LAYOUTS: dict[tuple[tuple[str, ...], tuple[type, ...]], _Layout] = {}
_NUMBERS: dict[Any, int] = {}  # classes by their facts
