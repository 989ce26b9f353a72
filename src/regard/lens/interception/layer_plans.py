"""LayerPlans: what the analysis of a layer found, used again for runs that call the same functions.

What
    To follow a small layer function by function takes longer than to run it, and the layers of a model are alike. A
    `Lesson` writes down a run while it is analyzed: each function, its numbers, and which tensors it takes. If the run
    left nothing open, a `Plan` says which tensors are the queries, keys, values and weights of its attentions. The
    functions of a later run are held in a `RunLog` until the module returns. If they are the same, on the same tensors,
    the plan is applied.

Proof
    That the functions are the same is no proof. Weights that a layer wrote out are computed from the queries and keys
    that the plan names, and rows of them are compared with those of the model. If they differ, or if anything else
    does, the run is analyzed in full.

Lifetimes
    A log holds its tensors until the module returns, so there are plans for runs with small tensors only. Plans hold no
    tensors and are kept for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ..eager.dim_origins import DimOrigins, Origin
from ..eager.op_rules import is_in_place
from ..eager.tracker import ROWS, TOLERANCE, EagerAttention
from ..recording.observed import ObservedAttention
from ..recording.recorder import WrittenWeights
from ..recording.store import version_of

MAX_FUNCTIONS = 128  # runs that call more are not planned, but the modules within them may be
MAX_BYTES = 2**25  # bytes of the tensors that a planned run makes
MAX_MISSES = 8  # runs in a row that neither fitted a plan nor gave one, before their kind is logged no more
MAX_PLANS = 8  # plans for one kind of run
MAX_PLANS_BY_OPERATORS = 256  # plans for one kind of run, by attributes and arguments
MAX_KINDS = 64  # shapes of inputs that are remembered for a module class
ENTERED, LEFT = object(), object()  # in place of a function: a module within the run begins or returns

Op = tuple[Any, Any, Any, Any]  # function, its arguments by position and by name, its result

PLAIN_TYPES = frozenset(
    (
        *(int, float, bool, str, type(None), type(Ellipsis), slice),
        torch.dtype,
        torch.Size,
        torch.device,
        torch.memory_format,
    )
)


class CannotPlan(Exception):
    """A run holds something whose later runs may differ unseen."""


class KeptView(NamedTuple):
    """A view of a tensor of a run, in its memory."""

    at: int  # place of the tensor in the run
    whole: tuple[Any, ...]  # shape, strides, place, dtype and version of the tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, run: Sequence[Any]) -> Tensor | None:
        """Return the view of the tensor of another run; None if it lies otherwise in memory, or was written to."""
        x, (shape, stride, offset, dtype, version) = run[self.at], self.whole
        if x.shape != shape or x.stride() != stride or x.storage_offset() != offset or x.dtype != dtype:
            return None
        if version_of(x) != version:
            return None
        is_whole = self.size == shape and self.stride == stride and self.offset == offset
        return x if is_whole else x.as_strided(self.size, self.stride, self.offset)

    def rows(self, step: int) -> KeptView:
        """Return each row of matrices `b h i d` that is a multiple of `step` before the last one, at most ROWS."""
        b, h, i, d = self.size
        rows = min(ROWS, (i - 1) // step + 1)
        first = i - 1 - step * (rows - 1)
        stride = (*self.stride[:2], self.stride[2] * step, self.stride[3])
        return self._replace(size=(b, h, rows, d), stride=stride, offset=self.offset + self.stride[2] * first)

    @property
    def mT(self) -> KeptView:
        """The view with its last two dims swapped."""
        (*lead, i, d), (*strides, over_i, over_d) = self.size, self.stride
        return self._replace(size=(*lead, d, i), stride=(*strides, over_d, over_i))

    @property
    def without_batch(self) -> KeptView:
        """The view of the first matrices of the batch."""
        return self._replace(size=self.size[1:], stride=self.stride[1:])


def whole_of(x: Tensor) -> tuple[Any, ...]:
    """Return the form of a tensor in memory, and the number of in-place writes to it."""
    return x.shape, x.stride(), x.storage_offset(), x.dtype, version_of(x)


class PlannedAttention(NamedTuple):
    """The places of one attention in a run."""

    part: int  # number of the module that attends, among those that the run enters
    heads: int | None  # number of heads, from the attributes of the layer
    terms: ObservedAttention  # without tensors
    q: KeptView
    k: KeptView
    written_out: WrittenOut | None  # None if the kernel is known
    guess: str | None

    def read(self, run: Sequence[Any]) -> ObservedAttention | None:
        """Return the attention of another run, without values; None if its weights are not those of the model."""
        if not (self.written_out is None or self.written_out.is_proved(run)):
            return None
        return self.read_unproved(run)

    @property
    def places(self) -> list[int]:
        """The places in a run at which its tensors stand."""
        views = [self.q, self.k] if self.written_out is None else [self.q, self.k, self.written_out.weights]
        return [view.at for view in views]

    def read_unproved(self, run: Sequence[Any]) -> ObservedAttention | None:
        """Return the attention of another run, without values; None if its queries or keys lie otherwise in memory."""
        views = self.views(run)
        return None if views is None else self.terms._replace(q=views[0], k=views[1])

    def views(self, run: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """Return the queries and keys of another run; None if they lie otherwise in memory."""
        q, k = self.q.of(run), self.k.of(run)
        return None if q is None or k is None else (q, k)


class WrittenOut(NamedTuple):
    """Rows of weights that a model computed by itself, the queries of these rows, and all keys."""

    q: KeptView  # b h rows d
    kT: KeptView  # b h d j
    found: KeptView  # b h rows j
    scale: float
    weights: KeptView  # b h rows j
    rows: slice  # the queries that are compared

    @classmethod
    def of(cls, q: KeptView, k: KeptView, found: KeptView, scale: float) -> WrittenOut:
        """Return at most ROWS rows of each matrix, the last among them."""
        queries = q.size[2]
        step = max(1, (queries - 1) // (ROWS - 1))
        first = queries - 1 - step * (min(ROWS, (queries - 1) // step + 1) - 1)
        q, kT, found = q.rows(step), k.mT, found.rows(step)
        weights = found
        if q.size[0] == 1:  # products of three dims take PyTorch fewer steps
            q, kT, found = q.without_batch, kT.without_batch, found.without_batch
        return cls(q, kT, found, scale, weights, slice(first, queries, step))

    def rows_of(self, run: Sequence[Any]) -> WrittenWeights | None:
        """Return the rows of another run; None if its weights lie otherwise in memory, or were written to."""
        found = self.weights.of(run)
        return None if found is None else WrittenWeights(found, self.rows, self.scale)

    def is_proved(self, run: Sequence[Any]) -> bool:
        """Whether the rows are the softmax of q @ k.mT.

        The largest weight of a row is at least 1 / j, so an error that is small beside that is small in each row.
        """
        q, kT, found = self.q.of(run), self.kT.of(run), self.found.of(run)
        if q is None or kT is None or found is None:
            return False
        A = torch.softmax((q @ kT).mul_(self.scale), -1)
        return torch.dist(A, found).item() * A.shape[-1] <= TOLERANCE


class Plan(NamedTuple):
    """The functions of a run, and what it leaves behind.

    All functions, arguments and results stand in one sequence; whatever says `at` is a place in it.
    """

    functions: tuple[Any, ...]
    nested: tuple[bool, ...]  # for each function: are there sequences among its arguments or results?
    types: tuple[type, ...]
    plain: Expected  # values that are no tensors
    known: Expected  # at which places a tensor stands that stood before, and at which place
    parameters: Expected  # shapes of parameters
    given: Expected  # tensors from before the run, and the facts about them
    attentions: tuple[PlannedAttention, ...]
    made: tuple[tuple[int, torch.Size, Origin], ...]  # tensors that outlive the run, and their origins

    def sequence_of(self, ops: Sequence[Op], origins: DimOrigins) -> list[Any] | None:
        """Return the functions, arguments and results of another run; None if it did anything else."""
        if tuple(op[0] for op in ops) != self.functions:
            return None
        found: list[Any] = []
        for op, nested in zip(ops, self.nested, strict=True):
            found += _nested_sequence(op) if nested else _sequence(op)
        if tuple(map(type, found)) != self.types:
            return None
        at, values = self.plain
        if [found[n] for n in at] != values:
            return None
        at, values = self.given
        if [about_tensor(found[n], origins) for n in at] != values:
            return None
        (at, before), ids = self.known, list(map(id, found))
        if [ids[n] for n in at] != [ids[n] for n in before]:
            return None
        at, values = self.parameters
        return None if [found[n].shape for n in at] != values else found


Expected = tuple[list[int], list[Any]]  # places, and what stands there


def _sequence(op: Op) -> Sequence[Any]:
    func, args, kwargs, out = op
    return (func, *args, *kwargs, *kwargs.values(), out) if kwargs else (func, *args, out)


def _nested_sequence(op: Op) -> Iterator[Any]:
    """Yield what stands in a call, each sequence followed by what stands in it."""
    for x in _sequence(op):
        yield from _unfold(x)


def _unfold(x: Any) -> Iterator[Any]:
    yield x
    if type(x) in (tuple, list):
        for each in x:
            yield from _unfold(each)


def about_tensor(x: Tensor, origins: DimOrigins) -> tuple[Any, ...]:
    """Return the facts about a tensor from before the run: its form, and the origin of its dims."""
    return x.shape, x.dtype, x.device, origins.get(x)


def may_write(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the arguments may ask a function to write to a tensor, as in `relu(x, True)` or `relu(x, inplace=True)`.

    A log reads its tensors after the run, so it holds no such call.
    """
    return any(x is True for x in args) or (bool(kwargs) and (bool(kwargs.get("inplace")) or "out" in kwargs))


class Lesson:
    """A run that is analyzed, from which a plan may be made."""

    def __init__(self, runs: KnownRuns, depth: int, origins: DimOrigins) -> None:
        self.runs, self.depth = runs, depth
        self._origins = origins
        self._functions: list[Any] = []
        self._nested: list[bool] = []
        self._types: list[type] = []
        self._plain: Expected = [], []
        self._known: Expected = [], []
        self._parameters: Expected = [], []
        self._given: Expected = [], []
        self._refs: dict[int, ref[Tensor]] = {}  # tensors by place; the analysis has to see when they die
        self._numbers: dict[int, int] = {}  # id of a live tensor -> its first place
        self._wholes: dict[int, tuple[Any, ...]] = {}
        self._memories: dict[int, list[int]] = {}  # memory -> places of the live tensors in it
        self._made: list[int] = []  # places of results
        self._parts, self._path = 1, [0]
        self._bytes = 0
        self._attentions: list[PlannedAttention] = []

    def add(self, op: Op) -> None:
        """Add a call that was analyzed; raises `CannotPlan`."""
        func, args, kwargs, out = op
        if is_in_place(getattr(func, "__name__", "")) or may_write(args, kwargs):
            raise CannotPlan
        if any(isinstance(x, Tensor) and x.numel() == 1 for x in _nested_sequence((func, args, kwargs, None))):
            raise CannotPlan  # its value may be a scale
        nested = any(type(x) in (tuple, list) for x in _sequence(op))
        results = [id(x) for x in (out if type(out) in (tuple, list) else (out,))]
        self._add(func, nested, _nested_sequence(op) if nested else _sequence(op), results)
        if len(self._functions) > MAX_FUNCTIONS or self._bytes > MAX_BYTES:
            raise CannotPlan

    def enter(self, about: Any) -> None:
        """Add the call of a module within the run."""
        self._add(ENTERED, False, _sequence((ENTERED, about, None, None)))
        self._path.append(self._parts)
        self._parts += 1

    def leave(self) -> None:
        """Add the return of a module within the run."""
        self._add(LEFT, False, _sequence((LEFT, (), None, None)))
        self._path.pop()

    def attend(
        self, observed: ObservedAttention | None, eager: EagerAttention | None, heads: int | None, guess: str | None
    ) -> None:
        """Add an attention that the call under way completes; raises `CannotPlan`."""
        if observed is None or observed.bias is not None or observed.normalize is not None or observed.changed:
            raise CannotPlan
        mask = observed.mask
        if observed.statistic is not None or (mask is not None and any(True for _ in mask.tensors())):
            raise CannotPlan
        if eager is not None and not _is_plain(eager, observed):
            raise CannotPlan
        q, k, empty = self._view(observed.q), self._view(observed.k), torch.empty(0)
        written_out = None
        if eager is not None and eager.scores is not None:
            written_out = WrittenOut.of(q, k, self._view(eager.found), eager.scores.scale)
        terms = observed._replace(q=empty, k=empty, v=empty)
        self._attentions.append(PlannedAttention(self._path[-1], heads, terms, q, k, written_out, guess))

    def end(self) -> None:
        """Remember the plan of the run, which has ended; raises `CannotPlan`."""
        if not self._attentions:
            raise CannotPlan
        made = []
        for at in self._made:
            if (x := self._refs[at]()) is None:
                continue
            origin = self._origins.get(x)
            if origin is None or not _is_whole(origin) or whole_of(x) != self._wholes[at]:
                raise CannotPlan
            made.append((at, x.shape, origin))
        checks = self._plain, self._known, self._parameters, self._given
        leaves = tuple(self._attentions), tuple(made)
        plan = Plan(tuple(self._functions), tuple(self._nested), tuple(self._types), *checks, *leaves)
        self.runs.put_first(plan)
        PLANNED_FUNCTIONS.update(self._functions)

    def _add(self, func: Any, nested: bool, sequence: Iterable[Any], results: Sequence[int] = ()) -> None:
        self._functions.append(func)
        self._nested.append(nested)
        for x in sequence:
            at, kind = len(self._types), type(x)
            self._types.append(kind)
            if (before := self._numbers.get(id(x))) is not None:
                _expect(self._known, at, before)
            elif kind in (Tensor, Parameter):
                self._number(x, at)
                if id(x) in results:
                    self._made.append(at)
                    self._bytes += x.nbytes
                elif kind is Parameter:
                    _expect(self._parameters, at, x.shape)
                else:
                    _expect(self._given, at, about := about_tensor(x, self._origins))
                    if about[-1] is not None and not _is_whole(about[-1]):
                        raise CannotPlan
            elif kind in PLAIN_TYPES or x is func or func is ENTERED:
                _expect(self._plain, at, x)
            elif kind not in (tuple, list):
                raise CannotPlan

    def _number(self, x: Tensor, at: int) -> None:
        key, memory = id(x), x.untyped_storage().data_ptr()

        def forget(_: object) -> None:
            if self._numbers.get(key) == at:
                del self._numbers[key]
            self._memories[memory].remove(at)

        self._refs[at], self._wholes[at] = ref(x, forget), whole_of(x)
        self._numbers[key] = at
        self._memories.setdefault(memory, []).append(at)

    def _view(self, x: Tensor) -> KeptView:
        places = self._memories.get(x.untyped_storage().data_ptr())
        if not places or not x.numel() or self._wholes[places[-1]][-1] != version_of(x):
            raise CannotPlan
        at = places[-1]
        return KeptView(at, self._wholes[at], tuple(x.shape), x.stride(), int(x.storage_offset()))


def _expect(expected: Expected, at: int, what: Any) -> None:
    expected[0].append(at)
    expected[1].append(what)


def _is_whole(origin: Origin) -> bool:
    """Whether an origin says the same in another run: it is no piece of one tensor, and no function of parameters."""
    return origin.piece is None and not origin.is_learned


def _is_plain(eager: EagerAttention, observed: ObservedAttention) -> bool:
    """Whether an attention that a model wrote out is a softmax of scaled products, with equal heads in q and k."""
    scores, q, k = eager.scores, observed.q, observed.k
    is_product = scores is not None and not (scores.added or scores.hidden or scores.zeroed is not None)
    is_softmax = not eager.softmaxed.changes and eager.projection is None and observed.mask is None
    is_float = q.dtype == k.dtype == eager.found.dtype == torch.float32
    return is_product and is_softmax and is_float and q.shape[1] == k.shape[1] and not eager.context


class KnownRuns:
    """The plans for the runs of one kind: of a module class, with an input of one shape."""

    def __init__(self) -> None:
        self.plans: tuple[Plan, ...] = ()  # the latest first: layers of the same plan mostly follow each other
        self.misses = 0
        self.refused = False  # runs of this kind are neither planned nor logged
        self.by_operators: dict[Any, Any] = {}  # attributes and arguments -> the plan by operators
        self._latest: tuple[Any, Any] = None, None  # the latest key and its plan: hashing takes long
        self.failures = 0  # runs that did otherwise than their plan by operators

    def put_first(self, plan: Plan) -> None:
        """Move a plan to the front, or add it."""
        if not self.plans or self.plans[0] is not plan:
            self.plans = (plan, *(other for other in self.plans if other is not plan))[:MAX_PLANS]

    def put_operators(self, key: Any, plan: Any) -> None:
        """Remember a plan by operators."""
        if len(self.by_operators) >= MAX_PLANS_BY_OPERATORS:
            self.by_operators.clear()
        with suppress(TypeError):  # a value that has no hash
            self.by_operators[key] = plan

    def find_operators(self, key: Any) -> Any:
        """Return the plan by operators for these attributes and arguments; None if there is none."""
        known, plan = self._latest
        if known != key or key is None:
            try:
                plan = self.by_operators.get(key)
            except TypeError:
                return None
            if plan is not None:
                self._latest = key, plan
        return plan

    def fail(self, key: Any) -> None:
        """Forget a plan by operators that a run did not keep to."""
        self.by_operators.pop(key, None)
        self._latest = None, None
        self.failures += 1

    def miss(self) -> None:
        """Count a run that neither fitted a plan nor gave one; the first of all decides for a kind without plans."""
        self.misses += 1
        self.refused = not self.plans or self.misses >= MAX_MISSES


def known_runs(kind: type, *about: Any) -> KnownRuns:
    """Return the plans for runs of a module class with an input of this shape and state."""
    known = _KNOWN.get(kind)
    if known is None:
        known = _KNOWN[kind] = {}
    if (runs := known.get(about)) is None:
        if len(known) >= MAX_KINDS:
            known.clear()
        runs = known[about] = KnownRuns()
    return runs


_KNOWN: WeakKeyDictionary[type, dict[tuple[Any, ...], KnownRuns]] = WeakKeyDictionary()
PLANNED_FUNCTIONS: set[Any] = set()  # the functions that runs with a plan call; none of them writes in place


class RunLog:
    """The functions of a run under way, of a kind that has plans."""

    def __init__(self, runs: KnownRuns, parts: Sequence[nn.Module]) -> None:
        self.runs, self.depth = runs, len(parts)
        self.ops: list[Op] = []
        self.entered: list[tuple[nn.Module, ...]] = [tuple(parts[-2:])]  # modules of the run, each with that around it
        self.fitted: tuple[Plan, list[Any]] | None = None  # the plan that fits, and the run as one sequence

    def enter(self, parts: Sequence[nn.Module], about: Any) -> None:
        """Add the call of a module within the run, the last of `parts`."""
        self.entered.append(tuple(parts[-2:]))
        self.ops.append((ENTERED, about, None, None))

    def leave(self) -> None:
        """Add the return of a module within the run."""
        self.ops.append((LEFT, (), None, None))

    def find_attentions(
        self, origins: DimOrigins, heads_of: Callable[[Sequence[nn.Module]], int | None]
    ) -> list[tuple[nn.Module, str | None, ObservedAttention]] | None:
        """Return each attention of the run, with its layer and guess, and note what it made; None if no plan fits."""
        for plan in self.runs.plans:
            if (found := plan.sequence_of(self.ops, origins)) is not None:
                break
        else:
            return None
        self.runs.put_first(plan)
        if any(found[n].shape != shape for n, shape, _ in plan.made):
            return None
        read = []
        for attention in plan.attentions:
            parts = self.entered[attention.part]
            if heads_of(parts) != attention.heads or (observed := attention.read(found)) is None:
                return None
            read.append((parts[-1], attention.guess, observed))
        for n, _, origin in plan.made:
            origins.add(found[n], origin)
        self.runs.misses = 0
        self.fitted = plan, found
        return read
