"""Decoding steps as CUDA graphs: a search launches all kernels of a step at once.

A step of one token per row runs a hundred short kernels, and launching them takes longer than they do. A recorded step
writes to static caches, so a state that was stepped from is overwritten: only a search, which needs no state twice,
asks for it. `replay_objection` of `regard.decode` says why a model is not recorded.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import torch_internals
from ..graph_recorder import GraphRecorder
from ..nn import LearnedPositions
from ..nn.fast_decode import GLOBAL_HOOKS, FastSteps, has_hooks
from ..nn.row_starts import RowStarts
from ..nn.static_cache import RowClock, StaticCache, StaticKeyValues
from .decoder_state import CachedState

FEWEST_STEPS = 8  # fewer take less time than a recording
MIN_GROWTH = 256  # tokens that static caches have space for at first, unless the search is shorter
MIN_SHRUNK_ROWS = 128  # a step of fewer rows takes as long as one of half of them
MAX_KEPT = 8  # recorded steps per model that no search uses at the moment
MAX_KEPT_BYTES = 2**31  # the caches of recorded steps that no search uses
KNOWN_MODULES = ("torch.nn.", "regard.")  # modules whose calls do nothing but compute
NO_ATTENTION: Mapping[str, Tensor] = MappingProxyType({})

_graphs: weakref.WeakKeyDictionary[nn.Module, StepGraphs] = weakref.WeakKeyDictionary()
_recording = threading.Lock()  # CUDA records one graph at a time


def graphs_of(model: nn.Module) -> StepGraphs:
    """Return the recorded steps of a model, a module with `blocks` and `step`."""
    if model not in _graphs:
        _graphs[model] = StepGraphs(model)
    return _graphs[model]


def recorder_for(device: torch.device) -> GraphRecorder | None:
    """Return what records functions on a device, None if nothing does."""
    return GraphRecorder(device, errors="thread_local") if device.type == "cuda" else None


class StepGraphs:
    """The recorded steps of one model, by shape; recorded again when its weights, modules or hooks change."""

    def __init__(self, model: nn.Module) -> None:
        self.fast = FastSteps(model.blocks)  # type: ignore[arg-type]
        self.failure: str | None = None
        self.limit: float = math.inf  # number of learned positions, beyond which modules raise
        self._model = weakref.ref(model)
        self._steps: object = None
        self._weights: list[tuple[int, int, torch.dtype]] = []
        self._hook_id = -1
        self._free: list[RecordedStep] = []

    @property
    def model(self) -> Any:
        """The model, which these graphs do not keep alive."""
        return self._model()

    def objection(self) -> str | None:
        """Return why steps of the model are not replayed, None if they can be."""
        model = self.model
        device = next((x.device for x in model.parameters()), torch.device("cpu"))
        if recorder_for(device) is None:
            return f"the model is on {device}, and only steps on a CUDA device are recorded"
        if torch.is_grad_enabled():
            return "gradients are enabled; decode under torch.no_grad()"
        for module in model.modules():
            if module.training:
                return "the model is in training mode; call model.eval()"
            if not type(module).__module__.startswith(KNOWN_MODULES):
                return f"{type(module).__name__} is no module of PyTorch or regard, and a replay would not call it"
        if self._is_watched():
            return "hooks or a function mode watch the model, and a replay calls no module"
        if self.fast.steps() is None:
            return "autocast is on, or a block does more than softmax over all cached keys, so its modules run"
        self._forget_other_weights(model)
        return self.failure

    def begin(self, state: CachedState | ReplayedState, steps: int) -> Any:
        """Return the state with static caches, for a search of at most `steps` steps; or as it is."""
        if isinstance(state, ReplayedState):
            return state
        first = state.caches[0]
        if (
            steps < FEWEST_STEPS
            or state.watch
            or first.is_empty
            or first.block is not None
            or first.length >= self.limit
        ):
            return state
        if self.objection() is not None:
            return state
        rows = first.read(0, 0)[0].shape[0]
        try:
            recorded = self._take(state, rows, steps)
        except RuntimeError as error:  # from the recording, or no memory for it
            self.note_failure(error)
            return state
        self.fast.refresh()
        recorded.load(state)
        search = ReplayedSearch(self, recorded, state, steps)
        return ReplayedState(search, search.turn, rows)

    def note_failure(self, error: RuntimeError) -> None:
        """Stop replaying steps that use the given weights, and warn."""
        self.failure = f"recording failed: {''.join(str(error).splitlines()[:1])}"
        warnings.warn(f"decoding without CUDA graphs: {self.failure}", RuntimeWarning, stacklevel=2)

    def is_current(self, recorded: RecordedStep) -> bool:
        """Return whether modules, weights and hooks are those that were recorded."""
        return recorded.steps is self._steps and self._steps is self.fast.steps() and not self._is_watched()

    def release(self, recorded: RecordedStep) -> None:
        """Keep a recorded step for the next search of its shape; drop the oldest ones beyond the limits."""
        if recorded.steps is self._steps:
            self._free.append(recorded)
        while len(self._free) > MAX_KEPT or sum(each.nbytes for each in self._free) > MAX_KEPT_BYTES:
            self._free.pop(0)

    def _take(self, state: CachedState, rows: int, steps: int) -> RecordedStep:
        """Return a recorded step for the shape of the state, that no other search uses."""
        length = state.caches[0].length
        space = rounded_length(length + min(steps, max(length, MIN_GROWTH)))
        longest = max((rounded_length(source.k.shape[2]) for source in state.source), default=0)
        shape = StepShape(rounded_rows(rows // state.each), state.each, space, longest)
        stream = torch.cuda.current_stream().cuda_stream if state.caches[0].read(0, 0)[0].is_cuda else 0
        for n, recorded in enumerate(self._free):
            if (recorded.shape, recorded.stream) == (shape, stream):
                return self._free.pop(n)
        recorded = RecordedStep(self, replace(state, fast=self.fast), shape, stream, self._steps)
        recorded.record(reorder=False)
        return recorded

    def _is_watched(self) -> bool:
        if torch_internals.is_function_mode_enabled():
            modes = torch_internals.function_mode_stack()
            if any(type(mode).__name__ != "DeviceContext" for mode in modes):
                return True
        if self._hook_id != torch_internals.next_hook_id():
            if has_hooks(self.model) or any(GLOBAL_HOOKS):
                return True
            self._hook_id = torch_internals.next_hook_id()
        return False

    def _forget_other_weights(self, model: nn.Module) -> None:
        """Drop the graphs of other weights; a replay reads weights that changed in place."""
        weights = [(id(x), x.data_ptr(), x.dtype) for x in chain(model.parameters(), model.buffers())]
        if weights != self._weights or self._steps is not self.fast.steps():
            self.fast = FastSteps(model.blocks)  # type: ignore[arg-type]
            self._weights, self._steps, self.failure = weights, self.fast.steps(), None
            learned = (module.count for module in model.modules() if isinstance(module, LearnedPositions))
            self.limit = min(learned, default=math.inf)
            self._free.clear()


class StepShape(NamedTuple):
    """Sources, hypotheses of each, entries of a cache, and keys of a source."""

    sources: int
    each: int
    space: int
    source_space: int


class RecordedStep:
    """A step over a state at fixed addresses, as graphs: one that goes on, and one that selects rows before."""

    def __init__(self, graphs: StepGraphs, like: CachedState, shape: StepShape, stream: int, steps: object) -> None:
        self.shape, self.stream, self.steps = shape, stream, steps
        self.rows = shape.sources * shape.each
        device = like.caches[0].read(0, 0)[0].device
        with torch.inference_mode(False):
            self.clock = RowClock(self.rows, device)
            self.tokens = torch.zeros(self.rows, dtype=torch.long, device=device)
            self.order = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.caches = tuple(
            StaticCache(self.clock, cache, space=min(shape.space, rounded_length(cache.window or shape.space)))
            for cache in like.caches
        )
        self.source = tuple(
            StaticKeyValues.like(source, rows=shape.sources, space=shape.source_space) for source in like.source
        )
        self._like = replace(like, caches=(), source=(), attention={})
        self._graphs = weakref.ref(graphs)
        self._recorder = recorder_for(device)
        self._replays: dict[bool, tuple[Callable[[], None], Tensor]] = {}

    @property
    def room(self) -> float:
        """Number of tokens from which on an entry would be overwritten that a later token may see."""
        spaces = ((cache.both.shape[2], cache.window) for cache in self.caches)
        return min((space for space, window in spaces if window is None or space < window), default=math.inf)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(x.both.nbytes for x in self.caches) + sum(x.k.nbytes + x.v.nbytes for x in self.source)

    def load(self, state: CachedState) -> None:
        """Take over the rows of a state."""
        starts = state.caches[0].starts
        self.clock.at.fill_(state.caches[0].length)
        self.clock.starts.zero_()
        if starts is not None:
            self.clock.starts[: len(starts.starts)] = starts.starts
        for cache, other in zip(self.caches, state.caches, strict=True):
            cache.load(other)
        for source, given in zip(self.source, state.source, strict=True):
            source.load(given)

    def run(self, tokens: Tensor, order: Tensor | None, sources: Tensor | None) -> Tensor:
        """Make a step, of the rows in this order if one is given; return the logits, for the caller to keep."""
        self.tokens[: len(tokens)] = tokens
        if order is not None:
            self.order[: len(order)] = order
        if sources is not None:
            for source in self.source:
                source.move(sources)
        replay, logits = self._replays[order is not None]
        replay()
        return logits[: len(tokens)].clone()

    def record(self, *, reorder: bool) -> None:
        """Record the step, once. It runs before, over the entry that the next token will overwrite."""
        if reorder in self._replays:
            return
        assert self._recorder is not None
        at = self.clock.at.clone()
        self.order.copy_(torch.arange(self.rows, device=at.device))

        def step() -> Tensor:
            self.clock.begin()
            if reorder:
                self.clock.starts.copy_(self.clock.starts.index_select(0, self.order))
                for cache in self.caches:
                    cache.select(self.order)
            graphs = self._graphs()
            assert graphs is not None
            caches: Any = self.caches
            state = replace(self._like, caches=caches, source=self.source)
            logits: Tensor = graphs.model.step(self.tokens, state)[0]
            self.clock.at.add_(1)
            return logits

        with _recording:
            try:
                self._recorder.warm_up(step)
                self.clock.at.copy_(at)
                self._replays[reorder] = self._recorder.record(step)
            finally:
                self.clock.at.copy_(at)
                self.clock.begin()

    def state(self, like: CachedState, length: int, *, is_ragged: bool) -> CachedState:
        """Return a state of all rows with caches of its own."""
        starts = RowStarts(self.clock.starts.clone()) if is_ragged else None
        caches = tuple(cache.to_cache(length, starts) for cache in self.caches)
        return replace(like, caches=caches, source=tuple(source.to_key_values() for source in self.source))


class ReplayedSearch:
    """One search over a recorded step, which is free for another when the search is gone."""

    def __init__(self, graphs: StepGraphs, recorded: RecordedStep, state: CachedState, steps: int) -> None:
        self.graphs, self.recorded, self.left = graphs, recorded, steps
        self.length = state.caches[0].length
        self.is_ragged = state.caches[0].starts is not None
        self.like = replace(state, caches=(), source=())
        self.turn = 0
        self._release = weakref.finalize(self, graphs.release, recorded)
        self._release.atexit = False

    def step(self, tokens: Tensor, state: ReplayedState) -> tuple[Tensor, Any]:
        """Make a step from the latest state."""
        recorded, model = self.recorded, self.graphs.model
        if tokens.ndim != 1 or not self.graphs.is_current(recorded):
            return model.step(tokens, self.leave(state))
        is_oversized = recorded.rows >= MIN_SHRUNK_ROWS and 2 * state.rows <= recorded.rows
        if self.length >= min(recorded.room, self.graphs.limit) or is_oversized:
            return model.step(tokens, self.graphs.begin(self.leave(state), self.left))
        if len(tokens) != state.rows:
            raise ValueError(f"tokens must be one for each of the {state.rows} rows of the state, got {len(tokens)}")
        try:
            recorded.record(reorder=state.order is not None)
        except RuntimeError as error:
            self.graphs.note_failure(error)
            return model.step(tokens, self.leave(state))
        logits = recorded.run(tokens, state.order, state.sources)
        self.length, self.left = self.length + 1, self.left - 1
        return logits, self.next(state.rows)

    def select(self, order: Tensor) -> Any:
        """Return the state of rows as they were at the last step."""
        each = self.recorded.shape.each
        if len(order) > self.recorded.rows or len(order) % each:
            return None
        if not self.recorded.source:
            return self.next(len(order), order)
        owners = order.div(each, rounding_mode="floor").view(-1, each)
        sources = owners[:, 0]
        are_in_place = sources == torch.arange(len(sources), device=sources.device)
        is_even, in_place = torch.stack([(owners == owners[:, :1]).all(), are_in_place.all()]).tolist()
        if not is_even:  # a source would have another number of hypotheses
            return None
        return self.next(len(order), order, None if in_place else sources)

    def next(self, rows: int, order: Tensor | None = None, sources: Tensor | None = None) -> ReplayedState:
        """Return the latest state."""
        self.turn += 1
        return ReplayedState(self, self.turn, rows, order, sources)

    def leave(self, state: ReplayedState) -> Any:
        """Return the state with caches of its own; the search goes on without replays."""
        left: Any = self.recorded.state(self.like, self.length, is_ragged=self.is_ragged)
        order = torch.arange(state.rows, device=self.recorded.order.device) if state.order is None else state.order
        self.turn = -1
        self._release()
        return left.select(order)


@dataclass(frozen=True, eq=False)
class ReplayedState:
    """The state of a search whose steps are replayed; the next step, or the choice of rows, overwrites it."""

    search: ReplayedSearch = field(repr=False)
    turn: int
    rows: int
    order: Tensor | None = None  # rows that were selected since the last step
    sources: Tensor | None = None  # their sources, if these are others than before
    attention = NO_ATTENTION

    def select(self, rows: Tensor) -> Any:
        """Return the state of the given rows, in their order; a row may repeat."""
        self._check_is_latest()
        order = rows if self.order is None else self.order[rows]
        state = self.search.select(order)
        return self.search.leave(self).select(rows) if state is None else state

    def step(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Read a token per row; return the logits of each next token, and the state after it."""
        self._check_is_latest()
        return self.search.step(tokens, self)

    def _check_is_latest(self) -> None:
        if self.turn != self.search.turn:
            raise RuntimeError(
                "this state was overwritten by a later step of its search; step from states of model.start(), which "
                "are not replayed and stay as they are"
            )


def rounded_rows(n: int) -> int:
    """Return the number of rows that is recorded for n: a power of two, from 64 on a multiple of 64."""
    return -(-n // 64) * 64 if n > 64 else 1 << max(0, n - 1).bit_length()


def rounded_length(n: int) -> int:
    """Return the number of entries that is recorded for n: 64, 96, 128, 192, 256, 384 and so on."""
    power = max(64, 1 << max(0, n - 1).bit_length())
    return power * 3 // 4 if power > 64 and n <= power * 3 // 4 else power
