"""AttentionMode: intercepts the attention calls of a model while it runs, and knows which layer makes them.

What
    A torch function mode sees each call of `attend`, `F.scaled_dot_product_attention` and
    `F.multi_head_attention_forward`, and the matmul and softmax calls by which a model writes attention out. Forward
    hooks show which layer is under way. The transformers interfaces (`transformers.py`) and patched kernels
    (`patching.py`) report to the same mode.

How it flows
    Every entrance calls `AttentionMode.observe` with the layer, a function that reads the `KernelCall`, and the output.
    The consumer (a `Recorder` for `capture`, or one that changes heads for `ablate`) receives an `InterceptedAttention`
    and returns the output that the model goes on with. While it works, no mode intercepts anything in this thread.
    A capture follows the first run of a layer function by function; later runs are recorded by its plan
    (`layer_plans.py`), or followed in the same way if they do anything else. A run that fitted a plan is known by a few
    operators from then on, which the dispatcher reports while the mode is off the stack (`operator_plans.py`).

Lifetimes
    The hooks exist while `intercept` is open. The mode itself costs a few microseconds for every function of PyTorch,
    more than many of them take to launch, so it is on the stack of a thread only while a layer runs whose class may
    attend by itself; most layers of transformers call an interface instead. While a mode is active,
    `nn.TransformerEncoder` takes its plain path, because nothing can be intercepted on its fused fast path.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property, partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from ... import torch_internals
from ...nn.core import Core
from ...nn.dropout import Dropout
from ...ops.call import with_equal_batch_dims
from ...ops.operator import attend
from ...ops.terms.scores import Dot
from ...ops.torch_state import in_functorch
from ...torch_internals import ORIGINAL_MODULE, functorch_transform
from ..eager.dim_origins import Dim, join_dims
from ..eager.given_layout import NO_LAYOUTS, GivenLayouts, LayoutMismatch
from ..eager.head_layout import (
    HeadChoice,
    HeadLayout,
    LayerEvidence,
    choose_layout,
    common_batch_dims,
    head_count,
    replace_heads,
    to_heads_function,
)
from ..eager.matmul import MATMUL_NAMES, operands
from ..eager.not_attention import NotAttention
from ..eager.op_rules import SOFTMAX_NAMES
from ..eager.tracker import SOFTMAX_BY_HAND, EagerAttention, EagerTracker, traced_name
from ..recording.edge_weights import EdgeWeights
from ..recording.observed import ObservedAttention
from ..recording.record import Record
from ..recording.recorder import Recorder
from ..recording.reduced import Reduced
from ..recording.sampled_weights import SparseWeights
from ..recording.store import Store, check_not_nested
from ..recording.unseen import failure_reason
from ..terms.interpret import Interpreter
from .compiled_graphs import WatchedCall, lse_of_graph
from .compiled_models import LensHook, is_watched_trace
from .edge_proof import EdgeProofs, passes_messages
from .func_transforms import UNSUPPORTED, unwrap_transforms
from .graph_masks import GraphMask
from .intercepted import (
    HEADS_SECOND,
    Consumer,
    InterceptedAttention,
    OutputLayout,
    note_replacement,
    replacement_of,
)
from .kernel_call import KernelCall, NotUnderstood, OutputProof
from .layer_plans import (
    ENTERED,
    LEFT,
    PLANNED_FUNCTIONS,
    CannotPlan,
    KnownRuns,
    Lesson,
    PlannedAttention,
    RunLog,
    known_runs,
    may_write,
)
from .module_scan import ATTENTIONS, attends, is_an_attention, may_attend, multiplies
from .opaque_calls import SCRIPTED as SCRIPTED_CALL
from .operator_plans import MAX_FAILURES, OTHERWISE, ClassFacts, OperatorLog, OperatorRun, key_of_run
from .operator_watch import SDPA_OPERATOR, can_watch, set_watcher
from .output_check import reproduces_output
from .output_projection import projection_weight
from .patching import KernelRun, inactive, is_active, remove_mode
from .sdpa import SDPA, is_recompute_cheap, is_sdpa_original, run_sdpa, sdpa_kernel_call, sdpa_with_lse
from .torch_multihead import merged_mask, project_inputs

FLEX = frozenset((torch.ops.higher_order.flex_attention,))
# Functions that neither take part in an attention nor change a tensor; `x.shape` is called as `Tensor.shape.__get__`.
WITHOUT_TENSORS = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_contiguous),
    )
)
MULTI_HEAD_FUNCTION, MULTI_HEAD_METHOD = F.multi_head_attention_forward, nn.MultiheadAttention.forward
MULTI_HEAD = inspect.signature(F.multi_head_attention_forward).parameters
MULTI_HEAD_DEFAULTS = {name: x.default for name, x in MULTI_HEAD.items() if x.default is not x.empty}


class _ThreadState(threading.local):
    """The state of one thread: a model may run in several."""

    def __init__(self, with_gradients: bool, is_buffer: Callable[[Tensor], bool]) -> None:
        self.parts: list[nn.Module] = []  # modules under way, the innermost last
        self.inputs: list[torch.Size | None] = []  # for each of them: shape of the first tensor given to it
        self.entered: list[bool] = []  # for each of them: did it put the mode on the stack?
        self.lifted: list[nn.Module] = []  # running modules whose own functions the mode leaves alone
        self.in_model = False  # is a forward pass of the whole model under way?
        self.silent = 0  # number of open `quiet` blocks
        self.first_positions: dict[tuple[int, int], int] = {}  # (queries, keys) of the latest mask -> first query
        self.awaiting: tuple[Callable[[Tensor], None], Tensor] | None = None  # a callback, and heads, b h i e
        self.tracker = EagerTracker(with_gradients=with_gradients, parts=self.parts, is_buffer=is_buffer)
        self.follows = False  # did the tracker follow a function of this pass?
        self.log: RunLog | None = None  # the calls of a module whose runs have plans
        self.operator_log: OperatorLog | None = None  # the operators of the same run
        self.lesson: Lesson | None = None  # the calls of a module whose runs have no plan yet
        self.operators: OperatorRun | None = None  # a run that is recorded by its operators; the mode is off the stack
        self.kernels: int | None = None  # attentions of a watched nn.MultiheadAttention, in which the mode stays idle


class _Buffers:
    """Whether a tensor is a buffer of a model; a mode holds it, so it must not hold the mode."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, x: Tensor) -> bool:
        return x is self._by_id.get(id(x))

    @cached_property
    def _by_id(self) -> dict[int, Tensor]:
        return {id(buffer): buffer for buffer in self._model.buffers()}


class _Opened(threading.local):
    """The observing modes that a thread has opened."""

    def __init__(self) -> None:
        self.modes: list[AttentionMode] = []


class _Paused(threading.local):
    """Number of consumers at work in this thread: what they call is not intercepted."""

    count = 0


_OPENED = _Opened()
_OPEN: dict[AttentionMode, None] = {}  # the modes that are open in any thread
_CHANGING: list[AttentionMode] = []  # modes whose consumers may change outputs, which no plan foresees
_PAUSED = _Paused()


@contextmanager
def _pause_interception() -> Iterator[None]:
    """Intercept nothing in this thread within the block."""
    _PAUSED.count += 1
    try:
        yield
    finally:
        _PAUSED.count -= 1


@contextmanager
def observers_quiet() -> Iterator[None]:
    """Record nothing in this thread within the block, in captures that are open."""
    with ExitStack() as stack:
        for mode in _OPENED.modes:
            stack.enter_context(mode.quiet())
        yield


class AttentionMode(TorchFunctionMode):
    """Hands every attention call of a model to a consumer.

    A `Recorder` observes: it sees each attention once, so layers that a backward pass computes again are skipped, and
    if several threads capture the same model, each sees what it runs itself. Any other consumer may change the output:
    it sees every call in every thread, recomputed layers included.
    """

    def __init__(
        self,
        model: nn.Module,
        consumer: Consumer,
        interpreter: Interpreter | None = None,
        layout: str | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.consumer = model, consumer
        self.recorder = consumer if type(consumer) is Recorder else None
        self.is_observer = self.recorder is not None  # it records, and never changes an output
        self.edges = None if self.recorder is None else EdgeProofs(self.recorder, _pause_interception)
        self.interpreter = Interpreter(Store()) if interpreter is None else interpreter
        self.parts, self.names, self.compiled_parts = _parts(model)
        self.ran = False
        self.called = False  # was the model itself called, and not just submodules?
        self.needs_modules = False  # must every module run as it is written, with its hooks?
        self.compiled = False  # did an attention run inside a compiled function?
        self.flexed = False  # did flex_attention run inside a compiled function?
        self.layouts = NO_LAYOUTS if layout is None else GivenLayouts.parse(layout, self.names.values())
        self.here = _ThreadState(with_gradients=not self.is_observer, is_buffer=_Buffers(model))
        self.softmaxes: dict[str, list[list[bool]]] = {}  # layer -> per softmax over q-k scores: [True] once averaged
        self.left_out: dict[str, NotAttention] = {}  # layer -> an average of its softmax that is no attention
        self.over_edges: set[str] = set()  # layers with a softmax over the edges of a graph, if nothing is recorded
        self.unclear: set[str] = set()  # layers named attention with a softmax over something else
        self._on = False
        recorder = self.recorder
        self._has_plans = recorder is not None and layout is None and not (recorder.values or recorder.gradients)
        self._head_counts: dict[int, int | None] = {}  # id of a module -> its number of heads
        self._class_facts = ClassFacts()
        self._known_runs: dict[Any, KnownRuns] = {}  # class and inputs of a module -> its plans
        self._layers: dict[int, str] = {}  # id of a module -> the layer that it belongs to
        self._parts_within: dict[int, list[nn.Module]] = {}  # id of a module -> the parts in it, itself first

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Intercept within the block."""
        everywhere = self.recorder is not None and self.recorder.values  # any layer may hold an output projection
        kinds = {kind for kind in set(map(type, self.parts)) if everywhere or may_attend(kind)}
        attending, entering = LensHook(self._enter_attention), LensHook(self._enter)
        leaving, remove = LensHook(self._leave), None
        hooks = [self.model.register_forward_pre_hook(LensHook(self._begin))]
        if kinds or (self.recorder is not None and self.recorder.pass_ended is not None):
            hooks.append(self.model.register_forward_hook(LensHook(self._end), always_call=True))
        self._on = True
        _OPEN[self] = None
        opened = _OPENED.modes
        if self.is_observer:
            opened.append(self)
        else:
            _CHANGING.append(self)
        try:
            hooked = kinds - SCRIPTED
            if hooked:
                enter = {kind: attending if attends(kind) or multiplies(kind) else entering for kind in hooked}
                chain = LensHook(self._enter_chain)
                remove = torch_internals.hook_forwards(
                    [
                        (part, chain if self._is_chain(part, hooked) else enter[type(part)], leaving)
                        for part in self.parts
                        if type(part) in hooked
                    ]
                )
            yield
        finally:
            self._on = False
            del _OPEN[self]
            if self.is_observer:
                opened.remove(self)
            else:
                _CHANGING.remove(self)
            for hook in hooks:
                hook.remove()
            if remove is not None:
                remove()
            self._withdraw()
            if not self.is_observer:
                note_replacement(None, None)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Intercept nothing of this model in this thread within the block."""
        self.interrupt_run()
        self.here.silent += 1
        try:
            yield
        finally:
            self.here.silent -= 1

    def observe(
        self,
        layer: str,
        read_call: Callable[[], KernelCall],
        out: Tensor | Callable[[], Tensor],
        layout: OutputLayout = HEADS_SECOND,
        proof: OutputProof | None = None,
        projection: Tensor | None = None,
        guess: str | None = None,
    ) -> Tensor:
        """Hand an attention call to the consumer; return the output that the model goes on with.

        If `out` is a function, it runs the kernel of the model once the consumer reads the output.
        """
        self.interrupt_run()
        return self._hand_over(InterceptedAttention(self, layer, read_call, out, layout, proof, projection, guess))

    def _hand_over(self, attention: InterceptedAttention) -> Tensor:
        """Hand an attention call to the consumer; return the output that the model goes on with."""
        self.here.awaiting = None
        _PAUSED.count += 1
        try:
            changed = self.consumer.observe(attention)
        finally:
            _PAUSED.count -= 1
        if not self.is_observer and (not attention.has_run or changed is not attention.out):
            replacement = attention.replacement or (replacement_of(attention.out) if attention.has_run else None)
            note_replacement(changed, replacement)
        return changed

    def _hand_over_planned(self, attention: InterceptedAttention, eager: EagerAttention | None = None) -> Tensor:
        """Hand over a call that a plan may foresee."""
        out = self._hand_over(attention)
        if self.here.lesson is not None:
            self._learn(
                lambda lesson: lesson.attend(
                    attention.observed, eager, self._heads_of(self.here.parts), attention.guess
                )
            )
        return out

    def observe_kernel(self, run: KernelRun, out: Tensor) -> Tensor:
        """Hand a call of a patched kernel to the consumer; return the output that the model goes on with."""
        self.interrupt_run()
        if self.is_observer and is_recomputing():
            return out
        if run.kernel.to_edge_weights is not None:
            self._observe_edges(run.kernel.to_edge_weights, run)
            return out
        return self.observe(self._layer, lambda: run.kernel_call, out, run.layout(out), run.proof)

    def _observe_edges(self, to_edge_weights: Callable[[KernelRun, nn.Module], EdgeWeights], run: KernelRun) -> None:
        """Record a softmax over the edges of a graph; consumers that change heads leave it as it is."""
        if self.recorder is None:
            self.over_edges.add(self._layer)
        if self.recorder is None or not self.recorder.is_wanted(self._layer):
            return
        try:
            with _pause_interception(), torch.no_grad():
                part = self.here.parts[-1]
                entry = self.recorder.record_sparse(self._layer, to_edge_weights(run, part))
                if passes_messages(part) and isinstance(entry, EdgeWeights) and self.edges is not None:
                    self.edges.begin(part, self._layer, entry, run.returned)
        except NotUnderstood as reason:
            self.recorder.note_unseen(self._layer, "graph attention", str(reason))

    def _follow_samples(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the average of sampled points that a call completes; consumers that change heads leave it as it is."""
        if self.recorder is None or not self.recorder.should_record(layer := self._layer):
            return
        with torch.no_grad():
            average = self.here.tracker.samples.follow(func, args, kwargs, out)
            if average is None:
                return
            try:
                A, guess = average.sampled_weights(self.here.tracker.origins, self._layout_of_maps)
            except (NotUnderstood, LayoutMismatch) as reason:
                self.recorder.note_unseen(layer, "deformable attention", str(reason))
                return
            self.recorder.record_sparse(layer, A)
            if guess is not None:
                self.recorder.guessed.setdefault(layer, guess)

    def _layout_of_maps(self, groups: Sequence[int], dims: Sequence[Dim] | None) -> HeadChoice:
        return choose_layout(groups, dims, self._evidence())

    def await_projection(self, heads: Tensor, callback: Callable[[Tensor], None]) -> None:
        """Call back with the weight of the first linear map that takes these heads, `b h i e`."""
        self.here.awaiting = callback, heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        here = self.here
        if here.kernels is not None:
            return func(*args, **kwargs)
        if (log := here.log) is not None and func in PLANNED_FUNCTIONS and not may_write(args, kwargs):
            out = func(*args, **kwargs)
            if not _PAUSED.count:
                log.ops.append((func, args, kwargs, out))
            return out
        if func in WITHOUT_TENSORS:
            return func(*args, **kwargs)
        parts = here.parts
        if parts and type(parts[-1]) in CONTAINERS and func not in ATTENTIONS and here.awaiting is None:
            return func(*args, **kwargs)
        if is_compiling():  # traced tensors hold no numbers
            self.compiled = self.compiled or func in ATTENTIONS
            self.flexed = self.flexed or func in FLEX
            return func(*args, **kwargs)
        if here.silent or _PAUSED.count or not self._on:
            return func(*args, **kwargs)
        if log is not None:
            self._analyze_log()
        if self.is_observer and is_recomputing():  # the same kernel saves the same tensors for backward
            return sdpa_with_lse(*args, **kwargs)[0] if func is SDPA else func(*args, **kwargs)
        if func in ATTENTIONS:
            out = self._attention(func, args, kwargs)
        else:
            if here.awaiting is not None:
                callback, heads = here.awaiting
                if (weight := projection_weight(heads, func, args, kwargs)) is not None:
                    callback(weight)
                    here.awaiting = None
            out = self._follow(func, args, kwargs, func(*args, **kwargs))
        if here.lesson is not None:
            self._learn(lambda lesson: lesson.add((func, args, kwargs, out)))
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Follow a call that has run, of a function that is no attention; return the output that the model takes."""
        here = self.here
        here.follows = True
        tracker, name = here.tracker, traced_name(func)
        eager: EagerAttention | NotAttention | None = None
        transformed = functorch_transform() is not None
        try:
            if tracker.traces.held and name not in SOFTMAX_NAMES:
                tracker.traces.follow(func, args, kwargs, out)
            if not transformed:
                tracker.origins.follow(func, args, kwargs, out)
                if self.edges is not None and self.edges.held:
                    self.edges.follow(func, args, kwargs, out)
                if func is F.grid_sample or tracker.samples.held:
                    self._follow_samples(func, args, kwargs, out)
            if name is not None or (tracker.holds_weights and type(out) is not torch.Size):
                called = name or str(getattr(func, "__name__", ""))
                if transformed:
                    eager = self._follow_transformed(called, args, kwargs, out)
                else:
                    eager = tracker.follow(called, args, kwargs, out, self._evidence)
        except (MemoryError, Warning):  # a budget is exceeded, or the caller turned warnings into errors
            raise
        except Exception as error:
            self._note_failure(name, error)
        if isinstance(eager, NotAttention):
            self._leave_out(eager)
        elif eager is not None:
            return self._written_out(eager, out)
        if name is None:
            return out
        if name in SOFTMAX_NAMES:
            self._note_softmax(tracker.is_averaged(out))
        elif name in SOFTMAX_BY_HAND and (averaged := tracker.is_averaged(out)) is not None:
            self._note_softmax(averaged)
        return out

    def _learn(self, step: Callable[[Lesson], None]) -> None:
        """Add a step to the lesson under way; give it up if it cannot be planned."""
        here = self.here
        try:
            if here.lesson is not None:
                step(here.lesson)
        except (CannotPlan, RuntimeError):  # a tensor without strides or a memory of its own
            self._give_up_lesson()

    def _give_up_lesson(self) -> None:
        here = self.here
        if here.lesson is not None:
            here.lesson.runs.miss()
            here.lesson = None

    def _watch_run(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Enter a module whose run has a plan by operators, and watch it without the mode; return whether it has."""
        here = self.here
        if here.log is not None or here.lesson is not None or here.lifted or not self._may_plan():
            return False
        within_mode = torch_internals.function_mode_depth() > 0
        if len(_OPEN) != 1 or (within_mode and torch_internals.function_mode_stack() != [self]):
            return False
        if within_mode:
            torch_internals.pop_function_mode()
        shape = _first_shape(args) or _first_shape(kwargs.values())
        here.inputs.append(shape)
        about = torch.is_grad_enabled(), *here.inputs
        if (runs := self._known_runs.get((type(module), about))) is None:
            runs = self._known_runs[type(module), about] = known_runs(type(module), *about)
        key, plan = None, None
        if runs.by_operators and not runs.refused and runs.failures < MAX_FAILURES and can_watch():
            given = (*args, *kwargs, *kwargs.values()) if kwargs else args
            key = key_of_run(self._parts_in(module), self._class_facts, given, here.tracker.origins)
            plan = runs.find_operators(key)
        if plan is None:
            here.inputs.pop()
            if within_mode:
                torch_internals.push_function_mode(self)
            return False
        if not (here.parts or here.in_model):
            self.interpreter.begin_pass()
        here.parts.append(module)
        here.entered.append(False)
        here.operators = OperatorRun(runs, key, plan, here.parts, within_mode=within_mode)
        set_watcher(self._follow_operator)
        return True

    def _watch_multi_head(
        self,
        module: nn.MultiheadAttention,
        *tensors: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        is_causal: bool = False,
        **others: Any,
    ) -> bool:
        """Watch for the one kernel that a multi-head attention without masks calls; return whether it is watched.

        The mode stays on the stack, for PyTorch takes its fused path without it, but follows nothing.
        """
        masks = key_padding_mask, attn_mask, module.bias_k
        if len(tensors) != 3 or need_weights or is_causal or any(x is not None for x in masks) or module.add_zero_attn:
            return False
        if (module.training and module.dropout) or "forward" in module.__dict__ or not self._may_plan():
            return False
        is_original = nn.MultiheadAttention.forward is MULTI_HEAD_METHOD and is_sdpa_original()
        is_original = is_original and F.multi_head_attention_forward is MULTI_HEAD_FUNCTION
        if not (self._has_plans and is_original and len(_OPEN) == 1 and can_watch()):
            return False
        self.here.kernels = 0
        set_watcher(self._follow_multi_head)
        return True

    def _follow_multi_head(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the kernel of a watched multi-head attention."""
        here, recorder = self.here, self.recorder
        if func is not SDPA_OPERATOR or here.kernels is None or recorder is None:
            return
        q, k, v, *options = args
        if q.ndim != 4 or any(isinstance(x, Tensor) or x for x in (*options, *kwargs.values())):
            return
        here.kernels += 1
        if not recorder.is_wanted(layer := self._layer):
            return
        sizes = q.shape, k.shape, v.shape, q.dtype
        terms = _PLAIN_TERMS.get(sizes)
        if terms is None:
            attention = InterceptedAttention(self, layer, lambda: KernelCall(q=q, k=k, v=v), out)
            self._hand_over(attention)
            if (observed := attention.observed) is not None:
                if len(_PLAIN_TERMS) >= MAX_SIZES:
                    _PLAIN_TERMS.clear()
                empty = torch.empty(0)
                _PLAIN_TERMS[sizes] = observed._replace(q=empty, k=empty, v=empty)
        elif not recorder.defer_copy(layer, terms, q, k):
            with torch.no_grad():
                recorder.record(layer, terms._replace(q=q, k=k))

    def _end_multi_head(self) -> None:
        """End a watched multi-head attention; it is named if it has not called its kernel once."""
        kernels, self.here.kernels = self.here.kernels, None
        set_watcher(None)
        if kernels != 1 and self.recorder is not None:
            self.recorder.note_unseen(self._layer, "attention", OTHERWISE)

    def _may_plan(self) -> bool:
        """Whether nothing is under way in this thread that a plan does not foresee."""
        here = self.here
        is_new = (not here.follows or here.tracker.is_idle) and here.awaiting is None
        if not is_new or (self.edges is not None and self.edges.held):
            return False
        if here.silent or _PAUSED.count or _CHANGING or torch_internals.backward_pass() != -1:
            return False
        return functorch_transform() is None and not torch_internals.is_any_autocast_enabled()

    def _begin_run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Log a run of a module that has plans; else learn from it."""
        here, shape = self.here, self.here.inputs[-1]
        if shape is None or (runs := known_runs(type(module), torch.is_grad_enabled(), *here.inputs)).refused:
            return
        if not self._may_plan():
            return
        if not runs.plans:
            self._begin_lesson(runs, len(here.parts))
            return
        given, key = (*args, *kwargs, *kwargs.values()), None
        is_alone = len(_OPEN) == 1 and torch_internals.function_mode_stack() == [self]  # no other computes meanwhile
        if is_alone and runs.failures < MAX_FAILURES and can_watch():
            key = key_of_run(self._parts_in(module), self._class_facts, given, here.tracker.origins)
        here.log = RunLog(runs, here.parts)
        if key is not None:
            here.operator_log = OperatorLog(key, given)
            set_watcher(self._log_operator)

    def _parts_in(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of the model within a module, itself first."""
        if (found := self._parts_within.get(id(module))) is None:
            found, names = [module], self.names
            if names.keys().isdisjoint(map(id, module._modules.values())):
                self._parts_within[id(module)] = found
                return found
            for part in found:  # the list grows during the walk
                for each in part._modules.values():
                    if id(each) in names and each is not None and each not in found:
                        found.append(each)
            self._parts_within[id(module)] = found
        return found

    def _log_operator(self, *op: Any) -> None:
        """Add an operator that has run to the log under way."""
        log = self.here.operator_log
        if log is not None and not (self.here.silent or _PAUSED.count or torch_internals.in_tracing_mode()):
            log.ops.append(op)

    def _end_operator_log(self) -> OperatorLog | None:
        """End the log of operators under way, and return it."""
        log, self.here.operator_log = self.here.operator_log, None
        if log is not None:
            set_watcher(None)
        return log

    def _follow_operator(self, *op: Any) -> None:
        """Follow an operator that has run, and record the attention that it completes.

        What a compiler traces is passed by: the stack of modes must not change meanwhile.
        """
        here = self.here
        run = here.operators
        if run is None or here.silent or _PAUSED.count or torch_internals.in_tracing_mode():
            return
        is_plain = functorch_transform() is None and torch_internals.backward_pass() == -1
        step = run.follow(*op) if is_plain else None
        if step is not None and (attention := step.attention) is None:
            return
        if step is not None and attention is not None and self._record_followed(run, attention):
            run.end_attention(step)
            return
        func, args, kwargs, out = op
        if is_plain and func is SDPA_OPERATOR and run.has_plain_dims(args):
            self._dot_product(out, None, *args, **kwargs)
            run.is_open = False
        self._leave_plan(run)

    def _record_followed(self, run: OperatorRun, attention: PlannedAttention) -> bool:
        """Record an attention that its operators have completed; return False if it is not the one of the plan."""
        recorder, parts = self.recorder, run.entered[attention.part]
        assert recorder is not None
        if run.within_mode and not attention.part and self._heads_of(parts) != attention.heads:
            return False  # an attribute of the module around it, which the plan does not know
        if (views := attention.views(run.values)) is None:
            return False
        written_out = attention.written_out
        rows = None if written_out is None else written_out.rows_of(run.values)
        if written_out is not None and rows is None:
            return False
        if (layer := self._layers.get(key := id(parts[-1]))) is None:
            layer = self._layers[key] = layer_of(self.names[key], parts[-1])
        if not recorder.is_wanted(layer):
            return True
        if not recorder.defer_copy(layer, attention.terms, *views, rows, run.forget_plan):
            with torch.no_grad():
                if written_out is not None and not written_out.is_proved(run.values):
                    return False
                recorder.record(layer, attention.terms._replace(q=views[0], k=views[1]))
        if attention.guess is not None:
            recorder.guessed.setdefault(layer, attention.guess)
        return True

    def _leave_plan(self, run: OperatorRun) -> None:
        """Name the layer under way, whose run differs from its plan; what follows in the run is analyzed in full."""
        self._stop_watching(goes_on=True)
        run.forget_plan()
        if self.recorder is not None and run.is_open:
            self.recorder.note_unseen(self._layer, "attention", OTHERWISE)

    def _stop_watching(self, goes_on: bool) -> None:
        """Watch no more; within a module, and in a run that goes on, the mode goes back on the stack."""
        here = self.here
        if (run := here.operators) is not None:
            here.operators = None
            if goes_on and not run.within_mode:
                here.entered[run.depth - 1] = True
            if goes_on or run.within_mode:
                torch_internals.push_function_mode(self)
        set_watcher(None)

    def _begin_lesson(self, runs: KnownRuns, depth: int) -> None:
        self.here.lesson = Lesson(runs, depth, self.here.tracker.origins)
        self._noted_before = self._noted

    def _enter_run(self, module: nn.Module, shape: torch.Size | None) -> None:
        """Note that a module is called within the run that is logged or learned from."""
        here = self.here
        log = here.log or here.lesson
        assert log is not None
        about = self._about_part(log.depth, shape)
        if here.log is not None:
            here.log.enter(here.parts, about)
            self._log_operator(ENTERED, about, None, None)
        else:
            self._learn(lambda lesson: lesson.enter(about))

    def _about_part(self, depth: int, shape: torch.Size | None) -> tuple[Any, ...]:
        """Return the class, name and input of the innermost module, for a run of the module at this depth."""
        parts = self.here.parts
        return type(parts[-1]), self.names[id(parts[-1])][len(self.names[id(parts[depth - 1])]) :], shape

    def _leave_run(self, out: Any) -> None:
        """Note that the innermost module returns, within the run or at its end."""
        here = self.here
        log = here.log or here.lesson
        assert log is not None
        if len(here.parts) > log.depth:
            log.leave()
            self._log_operator(LEFT, (), None, None)
        elif here.log is not None:
            self._apply_plan(here.log, out)
        else:
            self._end_lesson()

    @property
    def _noted(self) -> tuple[int, ...]:
        """Numbers that change if an analysis notes more than attentions."""
        assert self.recorder is not None
        lost = sum(not all(each) for each in self.softmaxes.values())
        return len(self.recorder.unseen), len(self.unclear), len(self.left_out), lost

    def _apply_plan(self, log: RunLog, out: Any) -> None:
        """Record the attentions of a logged run by its plan; if none fits, analyze it."""
        here, recorder = self.here, self.recorder
        assert recorder is not None
        operators = self._end_operator_log()
        with torch.no_grad():
            planned = log.find_attentions(here.tracker.origins, self._heads_of)
            for part, guess, observed in planned or ():
                if recorder.is_wanted(layer := layer_of(self.names[id(part)], part)):
                    if guess is not None:
                        recorder.guessed.setdefault(layer, guess)
                    recorder.record(layer, observed)
        if planned is None:
            operators = None  # the analysis has to see when tensors die
            self._analyze_log()
            self._end_lesson()
        elif operators is not None and log.fitted is not None:
            plan = operators.plan(log, *log.fitted, out)
            if plan is not None:
                log.runs.put_operators(operators.key, plan)
        here.log = None

    def _end_lesson(self) -> None:
        """Make a plan of the run that ends, unless its analysis left something open."""
        if self._noted != self._noted_before or not self.here.tracker.is_idle:
            self._give_up_lesson()
        self._learn(Lesson.end)
        self.here.lesson = None

    def _analyze_log(self) -> None:
        """Analyze the functions of the log, if there is one, as if they ran now, and learn from the run."""
        here = self.here
        if (log := here.log) is None:
            return
        here.log = None
        self._end_operator_log()
        self._begin_lesson(log.runs, log.depth)
        parts, inputs = here.parts[:], here.inputs[:]
        del here.parts[log.depth :], here.inputs[log.depth :]
        log.ops.reverse()
        entered = log.entered[:0:-1]
        while log.ops:  # tensors are released as the analysis goes on
            op = log.ops.pop()
            func, args, kwargs, out = op
            if func is ENTERED:
                here.parts.append(entered.pop()[-1])
                here.inputs.append(args[-1])
                self._learn(lambda lesson, about=args: lesson.enter(about))  # type: ignore[misc]
            elif func is LEFT:
                here.parts.pop()
                here.inputs.pop()
                self._learn(Lesson.leave)
            else:
                if func is SDPA:
                    self._dot_product(out, None, *args, **kwargs)
                else:
                    self._follow(func, args, kwargs, out)
                self._learn(lambda lesson, op=op: lesson.add(op))  # type: ignore[misc]
        here.parts[:], here.inputs[:] = parts, inputs

    def interrupt_run(self) -> None:
        """Analyze the log, and give up the lesson: something else than functions of PyTorch is observed."""
        self._analyze_log()
        self._give_up_lesson()

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run and hand over a call of an attention function."""
        if self.is_observer:
            if in_functorch():
                return self._run_in_transform(func, args, kwargs)
            check_not_nested(*args, **kwargs)
        if func is attend:
            read_call, run = partial(_attend_call, *args, **kwargs), partial(func, *args, **kwargs)
            return self.observe(self._layer, read_call, run() if self.is_observer else _run_on_demand(run))
        if func is F.multi_head_attention_forward:
            return self._multi_head({**MULTI_HEAD_DEFAULTS, **dict(zip(MULTI_HEAD, args, strict=False)), **kwargs})
        if not self.is_observer:
            return self._dot_product(_run_on_demand(partial(func, *args, **kwargs)), None, *args, **kwargs)
        q, k = (args[n] if len(args) > n else kwargs[name] for n, name in enumerate(("query", "key")))
        is_short = q.ndim == k.ndim == 4 and is_recompute_cheap(q, k)
        if not is_short:
            self._give_up_lesson()
        out, statistic = (run_sdpa(*args, **kwargs), None) if is_short else sdpa_with_lse(*args, **kwargs)
        return self._dot_product(out, statistic, *args, **kwargs)

    @property
    def keeps_gradients(self) -> bool:
        """True if the gradients of the outputs are kept, which only the tensors of the model have."""
        return self.recorder is not None and self.recorder.gradients

    def is_followed(self, x: Any) -> bool:
        """Return whether a tensor is scores, weights, or a function of them."""
        self.interrupt_run()
        return self.here.tracker.is_followed(x)

    def follow_as(self, x: Tensor, same: Tensor) -> None:
        """Follow a tensor as another one with the same values."""
        self.here.tracker.follow_as(x, same)

    def note_script(self) -> None:
        """Note that the running layer attends in a scripted function, whose original cannot be observed."""
        if self.recorder is not None and self.here.parts:
            self.recorder.note_unseen(self._layer, *SCRIPTED_CALL)

    def note_transform(self) -> None:
        """Note that an attention of the running layer ran inside a torch.func transform, where it is not recorded."""
        if self.recorder is not None and self.here.parts:
            self.recorder.note_unseen(self._layer, "attention", UNSUPPORTED)

    def note_traced(self, module: nn.Module) -> None:
        """Note that an attention of a module was traced: by torch.compile, or by a torch.func transform."""
        if is_compiling():
            self.compiled = True
        elif self.recorder is not None:
            self.recorder.note_unseen(layer_of(self.names[id(module)], module), "attention", UNSUPPORTED)

    def _note_failure(self, name: str | None, error: Exception) -> None:
        """Note that a rule failed on a call of the running layer, which goes on; a consumer that changes it raises."""
        if self.recorder is None:
            raise error
        self.recorder.note_unseen(self._layer, "attention", failure_reason(f"following its call of {name}", error))

    def _run_in_transform(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an attention function inside torch.func transforms, and observe it with the tensors that they hold."""
        self._give_up_lesson()
        out = func(*args, **kwargs)
        if func is not SDPA or self.recorder is None or self.recorder.gradients:
            self.note_transform()
            return out
        ndim = max(x.ndim for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

        def values(x: Any) -> Any:
            return unwrap_transforms(x, ndim=ndim) if isinstance(x, Tensor) else x

        args, kwargs, found = [*map(values, args)], {name: values(x) for name, x in kwargs.items()}, values(out)
        with torch_internals.outside_transforms():
            if found.ndim == 4 and found.shape[0] == self._evidence().heads != found.shape[1]:
                *args, found = (x.transpose(0, 1) if isinstance(x, Tensor) else x for x in (*args, found))
                kwargs = {name: x.transpose(0, 1) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
            self._dot_product(found, None, *args, **kwargs)
        return out

    def _follow_transformed(self, name: str, args: Any, kwargs: Any, out: Any) -> NotAttention | None:
        """Follow a call inside torch.func transforms, and observe the attention that it completes."""
        tracker = self.here.tracker
        self._give_up_lesson()
        if not self.is_observer:
            return None
        averages = name in MATMUL_NAMES and any(map(tracker.is_softmax, operands(name, args, kwargs)))
        try:
            eager = tracker.follow(name, args, kwargs, out, self._evidence)
        except RuntimeError:  # a rule that reads values, which wrappers do not have: its result is not followed
            eager = None
            if averages:
                self.note_transform()
        if isinstance(eager, NotAttention):
            self._leave_out(eager)
        elif eager is not None and self.recorder is not None and not self.recorder.gradients:
            eager = eager.without_transforms(self._evidence())
            with torch_internals.outside_transforms():
                self.observe(self._layer, eager.kernel_call, eager.out, HEADS_SECOND, eager.proof, guess=eager.guess)
        elif eager is not None:
            self.note_transform()
        return None

    def _written_out(self, eager: EagerAttention, out: Tensor) -> Tensor:
        """Hand over an attention that the model wrote out; `out` is the output of the call that completed it."""
        projection = eager.projection
        if projection is not None and self.is_observer:
            layout = OutputLayout(lambda grad: eager.heads(projection.gradient_of_averages(grad)), lambda heads: heads)
            return self.observe(self._layer, eager.kernel_call, out, layout, eager.proof, guess=eager.guess)
        averages = out if projection is None else projection.averages
        values = averages.detach()  # a hook on the averages may hold the layout, which must not hold the averages
        to_heads, before = eager.heads, self._latest_entry
        layout = OutputLayout(to_heads, lambda heads: replace_heads(values, heads, to_heads))
        attention = InterceptedAttention(
            self, self._layer, eager.kernel_call, averages, layout, eager.proof, guess=eager.guess
        )
        changed = self._hand_over_planned(attention, eager)
        if eager.context and (entry := self._latest_entry) is not before:
            self.here.tracker.contexts.keep(eager.context, (self._layer, entry))
        return changed if projection is None else _passed_on(projection.apply(changed), changed)

    @property
    def _latest_entry(self) -> Record | Reduced | SparseWeights | None:
        """The latest entry of the layer under way; None if nothing is recorded."""
        return None if self.recorder is None else self.recorder.latest_entry(self._layer)

    def _leave_out(self, average: NotAttention) -> None:
        """Note an average that is no attention; if its softmax may yet average something else, wait for the end."""
        if self.recorder is None:
            self.left_out[self._layer] = average
            return
        layer = self._layer
        if average.withdrawn is not None:
            layer, entry = average.withdrawn
            self.recorder.withdraw(layer, entry)
            self.here.awaiting = None
        if average.is_final:
            self.recorder.note_unseen(layer, average.kind, average.reason)
        else:
            self.left_out[self._layer] = average

    def _note_softmax(self, averaged: list[bool] | None) -> None:
        """Remember a softmax over q-k scores, or one over something else in a layer that should attend."""
        if averaged is not None:
            unfinished = [other for other in self.softmaxes.get(self._layer, ()) if not other and other is not averaged]
            self.softmaxes[self._layer] = [*unfinished, averaged]
        elif self.here.parts:
            kind: type = type(self.here.parts[-1])
            if is_an_attention(kind):
                self.unclear.add(self._layer)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            if not is_watched_trace():
                self.ran = self.called = True
        elif self.concerns(module):
            self.ran = self.called = self.here.in_model = True
            self.interpreter.begin_pass()

    def _end(self, module: nn.Module, args: Any, out: Any) -> None:
        if is_compiling():
            return
        self.here.in_model = False
        if self.recorder is not None and self.recorder.pass_ended is not None:
            with torch_internals.without_function_modes():  # a hook runs while the mode is active
                self.recorder.pass_ended()

    def _enter_attention(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            self._enter_running(module, args, kwargs)
        elif not is_watched_trace():
            self.compiled = True

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            self._enter_running(module, args, kwargs)

    def _enter_running(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Enter a module that runs as it is written."""
        if not self._has_part(module):
            return
        if self.is_observer and type(module) is nn.MultiheadAttention:  # takes nested tensors if it has no hooks
            check_not_nested(*args)
        self.ran = True
        here = self.here
        if self._has_plans and here.operators is None and self._watch_run(module, args, kwargs):
            return
        # The mode is off the stack while a function that it sees runs, such as backward() inside a forward pass.
        first = not here.parts or (not self.is_observer and not is_active(self))
        entering = first or (here.lifted != [] and here.lifted[-1] is here.parts[-1])
        entering = entering or (here.operators is None and not any(here.entered))
        if here.operators is None and type(module) in LAYERS_OF_TORCH and self._lift():
            here.parts.append(module)
            here.inputs.append(None)
            here.entered.append(False)
            here.lifted.append(module)
            return
        if here.operators is None:
            with torch_internals.without_function_modes():  # a hook runs while the mode is active
                shape = _first_shape(args) or _first_shape(kwargs.values())
        else:
            shape = _first_shape(args) or _first_shape(kwargs.values())
        here.parts.append(module)
        here.inputs.append(shape)
        here.entered.append(entering)
        if first and not here.in_model:
            self.interpreter.begin_pass()
        if entering:
            self._push()
        if type(module) is nn.MultiheadAttention and entering and self._watch_multi_head(module, *args, **kwargs):
            return
        if type(module) in LAYERS_OF_TORCH and self._lift():
            here.lifted.append(module)
            return
        if here.operators is not None:
            if not here.operators.enter(here.parts, self._about_part(here.operators.depth, shape)):
                self._leave_plan(here.operators)
        elif here.log is not None or here.lesson is not None:
            self._enter_run(module, shape)
        elif self._has_plans:
            with torch_internals.without_function_modes():
                self._begin_run(module, args, kwargs)

    def _is_chain(self, module: nn.Module, hooked: Collection[type]) -> bool:
        """Whether a module calls others alone, which put the mode on the stack themselves."""
        if not (self.is_observer and type(module) is nn.Sequential):
            return False
        return all(type(part) in hooked and id(part) in self.names for part in module._modules.values())

    def _enter_chain(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Enter a module that calls others alone, and leave the mode off the stack."""
        here = self.here
        if here.operators is not None or any(here.entered):
            self._enter(module, args, kwargs)
        elif not is_compiling() and self._has_part(module):
            self.ran = True
            if not (here.parts or here.in_model):
                self.interpreter.begin_pass()
            here.parts.append(module)
            here.inputs.append(_first_shape(args) or _first_shape(kwargs.values()))
            here.entered.append(False)

    def _lift(self) -> bool:
        """Take the mode off the stack while a layer of PyTorch calls its own functions; return whether it was done."""
        here = self.here
        is_watching = here.log is not None or here.lesson is not None or here.operators is not None
        if is_watching or not self._has_plans or torch_internals.function_mode_stack() != [self]:
            return False
        torch_internals.pop_function_mode()
        return True

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        # PyTorch also calls this for a module that failed in an earlier hook of the user, before `_enter` ran.
        here = self.here
        if not is_compiling() and self._has_part(module) and here.parts and here.parts[-1] is module:
            if here.kernels is not None:
                self._end_multi_head()
            elif (run := here.operators) is not None:
                if len(here.parts) == run.depth and run.end(here.tracker.origins, out):
                    self._stop_watching(goes_on=False)
                elif len(here.parts) == run.depth or not run.leave():
                    self._leave_plan(run)
            elif here.log is not None or here.lesson is not None:
                with torch_internals.without_function_modes():
                    self._leave_run(out)
            here.parts.pop()
            here.inputs.pop()
            if not here.parts:
                here.tracker.clear()
                here.follows = False
            if here.lifted and here.lifted[-1] is module:
                here.lifted.pop()
                torch_internals.push_function_mode(self)
            if here.entered.pop():
                self._pop()

    def _push(self) -> None:
        """Put the mode on the stack: one that changes outputs below those that observe, which see its changes."""
        above: list[Any] = []
        if not self.is_observer and _OPENED.modes:
            while (stack := torch_internals.function_mode_stack()) and stack[-1] in _OPENED.modes:
                above.insert(0, torch_internals.pop_function_mode())
        self.__enter__()
        for each in above:
            torch_internals.push_function_mode(each)

    def _pop(self) -> None:
        """Take the mode off the stack, where observers may be above it."""
        if self.is_observer:
            self.__exit__(None, None, None)
        elif is_active(self):
            remove_mode(self)

    @property
    def is_inside(self) -> bool:
        """True if a module of the model is under way in this thread, and calls are intercepted."""
        return self._on and bool(self.here.parts) and not self.here.silent and not _PAUSED.count

    def _withdraw(self) -> None:
        """Leave modules whose hooks were not called, as PyTorch does on KeyboardInterrupt."""
        here = self.here
        while here.parts and any(here.entered) and is_active(self):
            here.entered.remove(True)
            remove_mode(self)
        if here.parts:
            here.parts.clear()
            here.inputs.clear()
            here.entered.clear()
            here.lifted.clear()
            here.tracker.clear()
        if here.operator_log is not None or here.operators is not None or here.kernels is not None:
            set_watcher(None)
        here.log = here.lesson = here.operators = here.operator_log = here.kernels = None

    @property
    def _layer(self) -> str:
        """The name of the layer under way; a `Core` is a part of the layer that it belongs to."""
        part = self.here.parts[-1]
        return layer_of(self.names[id(part)], part)

    def _has_part(self, module: nn.Module) -> bool:
        """True if the module is a part of the model itself, and not of a copy of it."""
        return self._on and id(module) in self.names and (len(_OPEN) == 1 or self.concerns(module))

    def intercepts(self, module: nn.Module) -> bool:
        """True if calls of the module in this thread are intercepted."""
        return self._has_part(module) and not self.here.silent

    def can_watch_graphs(self) -> bool:
        """True if the calls of attention alone are wanted, and no tensor with gradients or projection after them."""
        recorder = self.recorder
        if self.needs_modules or (recorder is None and torch.is_grad_enabled()):
            return False
        return recorder is None or not (recorder.values or recorder.gradients)

    @contextmanager
    def watched_run(self, module: nn.Module) -> Iterator[None]:
        """Note that a compiled module runs within the block."""
        self.interrupt_run()
        here = self.here
        self.ran = True
        self.called = self.called or module is self.model
        if not (here.in_model or here.parts):
            self.interpreter.begin_pass()
        with inactive(self):  # a graph would be compiled again for an active mode
            yield

    def observe_graph(self, module: nn.Module, call: WatchedCall, mask: GraphMask | None) -> Tensor:
        """Hand over an attention call that a module makes in a graph; return the output that it goes on with."""
        here, out = self.here, call.out
        if not self._on or here.silent or _PAUSED.count or is_recomputing():
            return out if isinstance(out, Tensor) else run_resumed(out)
        query, key, value, gqa, lse = call.query, call.key, call.value, call.enable_gqa, lse_of_graph(call, mask)
        if call.copies > 1:
            key, gqa = key[:, :: call.copies], True
            value = value if value.shape[1] == key.shape[1] else value[:, :: call.copies]
        if self.recorder is not None and self.recorder.keeps_tensors:  # the graph writes other tensors over them
            query, key, lse = (
                _copy_as_unwritten(query),
                _copy_as_unwritten(key),
                None if lse is None else _copy_as_unwritten(lse),
            )
        here.parts.append(module)
        here.inputs.append(None)
        try:
            return self._dot_product(
                out if isinstance(out, Tensor) else partial(run_resumed, out),
                lse,
                query,
                key,
                value,
                mask,
                call.dropout_p,
                call.is_causal,
                call.scale,
                gqa,
            )
        finally:
            here.parts.pop()
            here.inputs.pop()

    def concerns(self, module: nn.Module) -> bool:
        """True if calls from this thread belong to this mode.

        For an observer that is False if the thread has opened only other captures of the module.
        """
        if not self.is_observer:
            return True
        modes = _OPENED.modes
        return self in modes or not any(id(module) in other.names for other in modes)

    def _heads_of(self, parts: Sequence[nn.Module]) -> int | None:
        """Return the number of heads of a layer, the last of the modules under way, from its attributes."""
        key = id(parts[-1])
        if key not in self._head_counts:
            self._head_counts[key] = head_count([(self.names[id(part)], part) for part in parts[-2:]])
        return self._head_counts[key]

    def _evidence(self) -> LayerEvidence:
        """Return the evidence for the choice between batch and heads in the layer under way."""
        here = self.here
        return LayerEvidence(
            self._heads_of(here.parts),
            tuple(shape for shape in reversed(here.inputs) if shape is not None),
            self.layouts.of(self._layer),
        )

    def _dot_product(
        self,
        out: Tensor | Callable[[], Tensor],
        statistic: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | GraphMask | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Hand over a call of `F.scaled_dot_product_attention`."""
        layout, to_heads, guess = HEADS_SECOND, None, None
        if attn_mask is not None:  # another call may hide other keys
            self._give_up_lesson()
        if not isinstance(out, Tensor):
            out = out if query.ndim == key.ndim == value.ndim == 4 else out()
        try:
            choice = self._layout_of_kernel(query, key, value, enable_gqa)
        except LayoutMismatch as reason:
            return self.observe(self._layer, partial(_refuse, str(reason)), out, layout)
        if choice is not None:
            whole = out if isinstance(out, Tensor) else out()
            function, guess, out = to_heads_function(whole.shape[:-2], choice.layout), choice.guess, whole
            layout = OutputLayout(function, lambda heads: replace_heads(whole, heads, function))
            to_heads = None if enable_gqa else function

        def read_call() -> KernelCall:
            q, k, v, mask, lse = query, key, value, attn_mask, statistic
            if to_heads is not None:
                q, k, v = map(to_heads, (q, k, v))
                lse = lse if lse is None else to_heads(lse[..., None]).squeeze(-1)
                mask = mask.values() if isinstance(mask, GraphMask) else mask
                mask = mask if mask is None or mask.ndim < 3 else to_heads(mask)
            return sdpa_kernel_call(q, k, v, mask, dropout_p, is_causal, scale, statistic=lse)

        return self._hand_over_planned(InterceptedAttention(self, self._layer, read_call, out, layout, guess=guess))

    def _layout_of_kernel(self, query: Tensor, key: Tensor, value: Tensor, gqa: bool) -> HeadChoice | None:
        """Return the layout of a call of `F.scaled_dot_product_attention`; None for b h i d.

        With `enable_gqa` the heads are the last batch dim.
        """
        lead = common_batch_dims(*(x.shape[:-2] for x in ((query,) if gqa else (query, key, value))))
        if gqa:
            return None if len(lead) == 2 else HeadChoice(HeadLayout.of((1, *lead), None))
        origins = self.here.tracker.origins
        known = [origins.origin_of(x).dims[:-2] for x in (query, key, value) if origins.get(x) is not None]
        dims = join_dims(known) if known else None
        if len(lead) != 2:
            return choose_layout(lead, dims, self._evidence())
        given = self.layouts.of(self._layer)
        if given is None and dims is None:
            return None
        choice = choose_layout(lead, dims, LayerEvidence(given=given))
        return None if choice.guess is not None or choice.layout == (lead, 1) else choice

    def _multi_head(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Run and hand over a call of `F.multi_head_attention_forward`."""
        heads, weight, bias = given["num_heads"], given["out_proj_weight"], given["out_proj_bias"]
        result: tuple[Tensor, Tensor | None]

        def read_call() -> KernelCall:
            q, k, v = project_inputs(given)
            dropout = given["dropout_p"] if given["training"] else 0.0
            return KernelCall(q=q, k=k, v=v, mask=merged_mask(given, k.shape[2]), dropout=dropout)

        def split_heads(joined: Tensor) -> Tensor:  # i b (h e) or i (h e) -> b h i e
            return joined.reshape(joined.shape[0], -1, joined.shape[-1]).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

        if self.is_observer:
            result = F.multi_head_attention_forward(**given)
            # The output is the joined heads times the projection, so its gradient is mapped back through the weight.
            layout = OutputLayout(lambda grad: split_heads(grad @ weight.detach()), lambda heads: heads)
            proof = None if is_sdpa_original() else _projected_proof(result[0], weight, bias)
            self.observe(self._layer, read_call, result[0], layout, proof, projection=weight.detach())
            return result
        # With the identity as its projection, the function returns the joined heads.
        given |= {"out_proj_weight": torch.eye(len(weight)).to(weight), "out_proj_bias": None}
        joined, A = F.multi_head_attention_forward(**given)
        layout = OutputLayout(split_heads, lambda changed: changed.permute(2, 0, 1, 3).reshape(joined.shape))
        changed = self.observe(self._layer, read_call, joined, layout)
        if A is not None and (replacement := replacement_of(changed)) is not None:
            weights = replacement.dense()
            A = (weights.mean(1) if given["average_attn_weights"] else weights).reshape(A.shape).to(A.dtype)
        return _passed_on(F.linear(changed, weight, bias), changed), A


MAX_SIZES = 1024
_PLAIN_TERMS: dict[Any, ObservedAttention] = {}  # sizes -> a multi-head attention without masks, without its tensors


def _copy_as_unwritten(x: Tensor) -> Tensor:
    """Return a copy of a tensor that counts as never written to, which `clone` within an operator does not."""
    return x.clone().data


def _passed_on(out: Tensor, heads: Tensor) -> Tensor:
    """Return what a layer computes from an output; if that is of another attention, it is known by what follows."""
    if (replacement := replacement_of(heads)) is not None:
        note_replacement(out, replacement)
    return out


def run_resumed(run: Callable[[], Tensor]) -> Tensor:
    """Run a kernel for a consumer: unlike what the consumer itself calls, it is intercepted by other modes."""
    paused, _PAUSED.count = _PAUSED.count, 0
    try:
        return run()
    finally:
        _PAUSED.count = paused


def _run_on_demand(run: Callable[[], Tensor]) -> Tensor | Callable[[], Tensor]:
    """Return a function that runs a kernel; if another mode may change the output, the output, which it has changed."""
    is_changed = any(isinstance(mode, AttentionMode) for mode in torch_internals.function_mode_stack())
    return run_resumed(run) if is_changed else partial(run_resumed, run)


def _refuse(reason: str) -> NoReturn:
    raise NotUnderstood(reason)


def _first_shape(given: Iterable[Any]) -> torch.Size | None:
    """Return the shape of the first tensor of at least two dims."""
    for x in given:
        if isinstance(x, Tensor) and not x.is_nested and x.ndim > 1:
            return x.shape
    return None


def _projected_proof(out: Tensor, weight: Tensor, bias: Tensor | None) -> OutputProof:
    """A test whether an interpretation gives the output, i b d or i d, of a multi-head attention."""

    def project(heads: Tensor) -> Tensor:  # b h i e -> b 1 i d
        return F.linear(heads.transpose(1, 2).flatten(2).to(weight.dtype), weight, bias)[:, None]

    rows = (out if out.ndim == 3 else out[:, None]).detach().transpose(0, 1)[:, None]
    return OutputProof(
        lambda observed: reproduces_output(observed, rows, rows=PROVED_ROWS, project=project),
        "other code has replaced F.scaled_dot_product_attention, and the output is not softmax(q @ k.mT) @ v",
    )


PROVED_ROWS = 64  # rows of each matrix that are compared if other code has replaced PyTorch's kernel
DOT = Dot()


def _attend_call(
    q: Tensor, k: Tensor, v: Tensor, *, score: Any = None, backend: str | None = None, **given: Any
) -> KernelCall:
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        q, k, v = with_equal_batch_dims(q, k, v)
    return KernelCall(q=q, k=k, v=v, score=score or DOT, **given)


# A backward pass may compute checkpointed layers again.
is_recomputing = torch_internals.in_backward


def layer_of(name: str, part: nn.Module) -> str:
    """Return the name of the layer that a module belongs to: for a `Core` named "core" that of its owner."""
    owner, _, own = name.rpartition(".")
    return owner if own == "core" and type(part) is Core else name


# Layers of PyTorch that attend by nn.MultiheadAttention alone.
CONTAINERS: frozenset[type] = frozenset(
    (
        *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.MultiheadAttention),
        *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    )
)
# Those that call nothing else that attends, and take no fast path while they or their parts have hooks.
LAYERS_OF_TORCH = frozenset((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
SCRIPTED = frozenset(torch_internals.SCRIPTED_MODULES)
LEAVES = frozenset((nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, Dropout))  # without submodules

# Leaves that no attention consists of: they have no softmax.
PLAIN_LEAVES = LEAVES | {nn.GELU, nn.ReLU, nn.SiLU, nn.Identity, nn.Tanh, nn.Sigmoid}


def _parts(model: nn.Module) -> tuple[list[nn.Module], dict[int, str], list[nn.Module]]:
    """Return the modules in which something may attend, the model first, their names by id, and compiled modules.

    A walk over a model takes as long as the launch of one of its layers, so it skips leaves of PyTorch early. What
    `torch.compile` made of a module stands for that module, and has its name.
    """
    parts, names, compiled = [model], {id(model): ""}, list[nn.Module]()
    for module in parts:  # the list grows during the walk
        if type(module) in SCRIPTED or not module._modules:
            continue
        prefix = f"{names[id(module)]}." if module is not model else ""
        for name, part in module._modules.items():
            kind: type = type(part)
            if part is None or kind in LEAVES or (_is_from_torch(kind) and not part._modules):
                continue
            if kind is nn.Sequential and PLAIN_LEAVES.issuperset(map(type, part._modules.values())):
                continue
            if (
                kind not in SCRIPTED
                and (ORIGINAL_MODULE in part._modules or part._compiled_call_impl is not None)  # spares a call of each
                and torch_internals.compiled_slot(part) is not None
            ):
                compiled.append(part)
                part = torch_internals.original_module(part)
            if id(part) not in names:
                names[id(part)] = prefix + name
                parts.append(part)
    return parts, names, compiled


@cache
def _is_from_torch(kind: type) -> bool:
    """True for module classes of PyTorch, which do not attend unless they have submodules."""
    return kind.__module__.startswith("torch.nn.modules.")
