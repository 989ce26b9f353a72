"""Intercept compiled modules: while a mode is open, their graphs show it each attention call, or they run as written.

What
    A compiled module keeps the function that runs it compiled in one of its attributes. Within the block a
    `_WatchedModule` stands there. For threads whose calls a mode intercepts it runs the module by graphs of its own, in
    which an operator beside each attention call reports it (`compiled_graphs`); for all others it calls the compiled
    function.

How it flows
    The module is compiled once more, by its own backend, whole or not at all. If the compiler cannot record it as one
    graph, if the graph may hold attention that no operator shows, or if a mode needs more than the calls, the module
    runs as it is written, and hooks and function modes see it as any other.

Lifetimes
    The compiled function is put back when the last mode closes. PyTorch keeps its graphs with it, so the model runs
    after the block what it ran before, and compiles nothing again. The watched graphs are kept as long as the module,
    for the next block. Both have code objects of their own, so neither counts for the recompilation limit of the other.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling

from ... import torch_internals
from ..layer_names import named_modules
from .compiled_graphs import WatchedCall, replace_calls, report_calls_to, watch_calls
from .graph_masks import GraphMask


class CompiledMode(Protocol):
    """A mode that may intercept the calls of a module."""

    def intercepts(self, module: nn.Module) -> bool:
        """True if calls of the module in this thread are intercepted."""

    is_observer: bool  # it never changes an output

    def can_watch_graphs(self) -> bool:
        """True if attention calls are all that the mode needs from a module."""

    def watched_run(self, module: nn.Module) -> Any:
        """Return a context for one run of a compiled module."""

    def observe_graph(self, module: nn.Module, call: WatchedCall, mask: GraphMask | None) -> Tensor:
        """Hand over an attention call that a module makes in a graph; return the output that it goes on with."""


@contextmanager
def compiled_modules_seen(mode: CompiledMode, modules: Collection[nn.Module]) -> Iterator[None]:
    """Let the mode intercept what these modules run, if they are compiled, within the block."""
    with _LOCK:
        watched = [each for module in modules if (each := _watch(module)) is not None]
        for each in watched:
            each.modes.append(mode)
    try:
        yield
    finally:
        with _LOCK:
            for each in watched:
                each.modes.remove(mode)
                if not each.modes:
                    each.restore()


class _Run:
    """A watched run of a compiled module: the modes that watch it, and the masks of its graph by number."""

    def __init__(self, module: _WatchedModule, modes: list[CompiledMode]) -> None:
        self.module, self.modes = module, modes
        self.constants: Mapping[int, GraphMask] = {}  # masks that have the same entries in every run
        self._masks: dict[int, GraphMask] = {}

    def mask_of(self, call: WatchedCall) -> GraphMask | None:
        """Return the mask of a call: one value for all calls of the graph that take it."""
        number, values = call.mask_number, call.attn_mask
        if number is not None and number in self.constants:
            return self.constants[number]
        if values is None:
            return None
        mask = GraphMask(lambda: values)
        if number is not None:
            mask = self._masks.setdefault(number, mask)
        mask.values = lambda: values  # the graph may write to the tensor of an earlier call
        return mask


class _Running(threading.local):
    """The compiled modules that run watched in this thread, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.as_written = 0  # open blocks in which no graph runs watched


_LOCK = threading.Lock()
_RUNNING = _Running()


class LensHook(partial[None]):
    """A hook of a mode; in a copy or a pickle of the model it is a function of Python that does nothing."""

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments


@contextmanager
def only_as_written() -> Iterator[None]:
    """Within the block modules that this thread intercepts run as they are written."""
    _RUNNING.as_written += 1
    try:
        yield
    finally:
        _RUNNING.as_written -= 1


def is_watched_trace() -> bool:
    """True while the compiler records a graph that will be watched."""
    return bool(_RUNNING.runs)


def _hide_hooks() -> bool:
    """Take the hooks of modes off the running module, so that no graph depends on them."""
    _RUNNING.runs[-1].module.hide_hooks()
    return True


for _function in (is_watched_trace, _hide_hooks):  # the compiler calls them once, while it records a graph
    setattr(_function, torch_internals.CONSTANT_WHEN_TRACED, True)


def _watch(module: nn.Module) -> _WatchedModule | None:
    """Return what stands for the compiled function of a module; None if the module is not compiled."""
    if (slot := torch_internals.compiled_slot(module)) is None:
        return None
    attributes, name = slot
    found = attributes[name]
    if not isinstance(found, _WatchedModule):
        original, compiled = torch_internals.original_module(module), attributes[name]
        graphs = _GRAPHS.get(original)
        if graphs is None or graphs.compiled() is not compiled:
            compiler = torch_internals.compiler_of(module)
            graphs = _GRAPHS[original] = _WatchedGraphs(weakref.ref(compiled), compiler)
            if compiler is not None and torch_internals.records_cuda_graphs(compiler[0]) and _is_on_gpu(original):
                graphs.refused = "its backend records CUDA graphs, in which operators of Python are not tested"
        found = attributes[name] = _WatchedModule(original, graphs, attributes, name)
    return found


def _is_on_gpu(module: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


class _WatchedModule:
    """A compiled module whose calls are seen in the threads that a mode intercepts."""

    def __init__(self, module: nn.Module, graphs: _WatchedGraphs, attributes: dict[str, Any], name: str) -> None:
        self.modes: list[CompiledMode] = []
        self._module, self._graphs = module, graphs
        self._attributes, self._name = attributes, name
        self._compiled: Callable[..., Any] = attributes[name]
        # Runs under way in all threads: by watched graphs, without hooks if they compile, or as written, with hooks.
        self._watched = self._written = 0
        self._changed = threading.Condition()
        self._hidden: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The modules within the compiled one by name, itself included."""
        return named_modules(self._module)

    def part(self, name: str) -> nn.Module:
        """Return the module of a name, without visiting the others."""
        return torch_internals.original_module(self._module.get_submodule(name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # unlike `is_compiling`, False while another thread compiles
            return self._compiled(*args, **kwargs)
        modes = [mode for mode in tuple(self.modes) if mode.intercepts(self._module)]
        if not modes:
            return self._compiled(*args, **kwargs)
        may_watch = self._graphs.refused is None and not _RUNNING.as_written
        if may_watch and all(mode.can_watch_graphs() for mode in modes):
            try:
                return self._run_watched(modes, args, kwargs)
            except NotCompiledError:
                pass
            except torch_internals.compiler_errors() as reason:
                self._graphs.refused = str(reason)
        return self._run_as_written(args, kwargs)

    def _run_watched(self, modes: list[CompiledMode], args: Any, kwargs: Any) -> Any:
        runs = _RUNNING.runs
        with self._changed:
            if self._written:
                raise NotCompiledError
            self._watched += 1
        with ExitStack() as stack:
            stack.callback(self._end_watched)
            for mode in modes:
                stack.enter_context(mode.watched_run(self._module))
            runs.append(_Run(self, modes))
            stack.callback(runs.pop)
            changes = not all(mode.is_observer for mode in modes)
            return self._graphs.call(changes, self._module, args, kwargs)

    def hide_hooks(self) -> None:
        """Take the hooks of modes off the modules until all watched runs end."""
        with self._changed:
            for part in self.parts.values():
                hooks, tables = torch_internals.forward_hooks(part)
                if any(type(hook) is LensHook for hook in hooks.values()):
                    self._hidden += [(table, list(table.items())) for table in tables]
                    for table in tables:
                        for key in [key for key in table if type(hooks.get(key)) is LensHook]:
                            del table[key]

    def _end_watched(self) -> None:
        with self._changed:
            self._watched -= 1
            while self._hidden and not self._watched:
                hooks, items = self._hidden.pop()
                hooks.clear()
                hooks.update(items)
            self._changed.notify_all()

    def _run_as_written(self, args: Any, kwargs: Any) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: not self._watched)
            self._written += 1
        try:
            return torch_internals.run_as_written(self._module, *args, **kwargs)
        finally:
            with self._changed:
                self._written -= 1

    def restore(self) -> None:
        """Put the compiled function back, unless the module has been compiled anew."""
        if self._attributes.get(self._name) is self:
            self._attributes[self._name] = self._compiled


class _WatchedGraphs:
    """The graphs of a compiled module in which attention calls are reported."""

    def __init__(self, compiled: weakref.ref[Any], compiler: tuple[Any, bool | None] | None) -> None:
        self.compiled = compiled  # the function that runs the module's own graphs
        self.refused: str | None = None if compiler is not None else "its backend is unknown"
        self._compiler = compiler
        self._runs: dict[bool, Callable[..., Any]] = {}

    def call(self, changes: bool, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module by graphs that show its calls, or that let a mode change them; compiles one if none fits."""
        if changes not in self._runs:
            assert self._compiler is not None
            backend, dynamic = self._compiler
            kind: type = type(module)
            self._runs[changes] = torch.compile(
                _entry(kind), backend=WatchingCompiler(backend, changes), fullgraph=True, dynamic=dynamic
            )
        return self._runs[changes](module, args, kwargs)


_GRAPHS: weakref.WeakKeyDictionary[nn.Module, _WatchedGraphs] = weakref.WeakKeyDictionary()


class NotCompiledError(Exception):
    """Watched graphs cannot run now: PyTorch did not compile them, or other threads run the module as written."""


@cache
def _entry(kind: type) -> Callable[..., Any]:
    """Return a function that calls a module as it is written; modules of a class share its graphs, as they may."""
    code = _call_module.__code__.replace(co_name=f"call_{kind.__name__}")
    return types.FunctionType(code, globals())


def _call_module(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not is_dynamo_compiling():  # PyTorch may call it without compiling it, as while another thread compiles
        raise NotCompiledError
    _hide_hooks()
    return module._call_impl(*args, **kwargs)


class WatchingCompiler:
    """A backend of torch.compile that adds operators to each graph and passes it to another backend."""

    def __init__(self, backend: Any, changes: bool) -> None:
        self._backend, self._changes = backend, changes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WatchingCompiler) or self._changes != other._changes:
            return False
        return bool(self._backend == other._backend)

    def __hash__(self) -> int:
        return hash(WatchingCompiler)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the backend, such as a context in which it compiles."""
        return getattr(self.__dict__["_backend"], name)

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        names = {id(part): name for name, part in _RUNNING.runs[-1].module.parts.items()}
        masks = replace_calls(graph, names) if self._changes else watch_calls(graph, names)
        compiled: Callable[..., Any] = self._backend(graph, inputs, **options)
        if masks is None:
            return compiled

        def run(*given: Any) -> Any:
            _RUNNING.runs[-1].constants = masks
            return compiled(*given) if self._changes else compiled(*given)[:-1]

        return run


def _report(call: WatchedCall) -> Tensor | None:
    """Hand an attention call of a graph to the modes that watch it; those that observe see the final output."""
    if not _RUNNING.runs:
        return None
    run = _RUNNING.runs[-1]
    mask = run.mask_of(call)
    for mode in sorted(run.modes, key=lambda mode: mode.is_observer):
        call = call._replace(out=mode.observe_graph(run.module.part(call.layer), call, mask))
    return call.out if isinstance(call.out, Tensor) else None


report_calls_to(_report)
