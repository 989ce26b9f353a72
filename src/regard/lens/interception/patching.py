"""Record calls to kernels that bypass __torch_function__ by patching their call sites.

What
    `flex_attention`, flash_attn, xformers and registered kernels do not reach a torch function mode. `patched` replaces
    every reference to such a kernel that the code of a model finds (a global, an attribute, a closure cell; see
    `call_sites`) by a `_PatchedKernel`.

How it flows
    The model calls a `_PatchedKernel`. It runs the kernel of the model, then hands a `KernelRun` (the arguments and the
    output) to every mode that has a layer under way in this thread. Each mode may return another output. Kernels that
    this kernel calls itself are parts of it and are not reported.

Lifetimes
    References are patched once, when the first mode opens, and restored when the last one closes, unless the model has
    replaced them meanwhile. `deepcopy` and `pickle` of a patched model yield the original kernels.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pkgutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import torch_internals
from ...ops.torch_state import in_functorch
from ..recording.store import check_not_nested
from .call_sites import CallSite, find_call_sites
from .intercepted import OutputLayout
from .kernel_call import KernelCall, OutputProof
from .output_check import reproduces_output
from .search_memory import SearchLog, remember, remembered_sites

if TYPE_CHECKING:
    from ..recording.edge_weights import EdgeWeights
    from ..recording.observed import ObservedAttention

INLINED = torch_internals.WRAPPER_MODULE  # torch.compile wraps callables that are no functions in one of this module
COMPARED_ROWS = 64  # rows of each matrix that are compared with the output of a kernel


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """A function that attends, and how its arguments are interpreted."""

    function: Callable[..., Any]
    homes: tuple[ModuleType, ...]  # modules that hold the function, for code that imports it when it runs
    to_kernel_call: Callable[[KernelRun], KernelCall]  # raises NotUnderstood
    layout: Callable[[KernelRun, Tensor], OutputLayout]
    mismatch: str  # reported if the output is not reproduced
    dropout: str | None = None  # name of the argument with the dropout probability
    rows_to_compare: int | None = COMPARED_ROWS  # None: all
    compare_only_if_ambiguous: bool = False
    # For a softmax over edges, whose calls have no KernelCall: its weights in a layer; raises NotUnderstood.
    to_edge_weights: Callable[[KernelRun, nn.Module], EdgeWeights] | None = None


class KernelRun:
    """A call of a kernel that has run."""

    def __init__(self, kernel: Kernel, called: Callable[..., Any], args: Any, kwargs: Any, returned: Tensor) -> None:
        self.kernel, self.returned = kernel, returned
        self.is_compiled = _is_compiled(called, kernel)
        self.args, self.kwargs = _all_arguments(called, kernel, args, kwargs)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        return dict(self._bound.arguments)

    @cached_property
    def kernel_call(self) -> KernelCall:
        """The call; raises `NotUnderstood` if its arguments are not supported."""
        return self.kernel.to_kernel_call(self)

    def layout(self, out: Tensor) -> OutputLayout:
        """Return the layout of an output of the kernel."""
        return self.kernel.layout(self, out)

    @property
    def proof(self) -> OutputProof:
        """A test whether an interpretation reproduces the output of the kernel, before dropout."""
        kernel = self.kernel

        def agrees(observed: ObservedAttention) -> bool:
            out = self._without_dropout
            return reproduces_output(observed, self.layout(out).heads(out), rows=kernel.rows_to_compare)

        return OutputProof(agrees, kernel.mismatch, kernel.compare_only_if_ambiguous)

    @cached_property
    def _bound(self) -> inspect.BoundArguments:
        bound = _signature(self.kernel.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound

    @cached_property
    def _without_dropout(self) -> Tensor:
        """The output without dropout: if the model drops weights, the kernel runs once more."""
        name = self.kernel.dropout
        if name is None or not self.arguments.get(name):
            return self.returned.detach()
        again = inspect.BoundArguments(self._bound.signature, OrderedDict(self.arguments | {name: 0.0}))
        with torch.no_grad(), torch.random.fork_rng([self.returned.device] if self.returned.is_cuda else []):
            return _first(self.kernel.function(*again.args, **again.kwargs))


class KernelMode(Protocol):
    """A function mode that wants to see calls of kernels while a layer of its model is under way."""

    is_observer: bool  # it never changes an output

    @property
    def is_inside(self) -> bool:
        """True if a layer of the model is under way in this thread."""

    def observe_kernel(self, run: KernelRun, out: Tensor) -> Tensor:
        """Return the output that the model goes on with; `out` is that of the modes before this one."""

    def note_transform(self) -> None:
        """Note that an attention of the running layer ran inside a torch.func transform, where it is not recorded."""


@contextmanager
def patched(mode: KernelMode, parts: Collection[nn.Module], kernels: Collection[Kernel]) -> Iterator[None]:
    """Report calls of the kernels to the mode within the block."""
    known = {id(kernel.function): kernel for kernel in kernels}
    homes = tuple(dict.fromkeys(home for kernel in kernels for home in kernel.homes))

    def kernel_of(value: Any) -> Kernel | None:
        """Return the kernel that a callable is, also if it is compiled or a `functools.partial`."""
        while value is not None and id(value) not in known:
            value = _inner_callable(value)
        return None if value is None else known[id(value)]

    with _LOCK:
        targets = [kernel.function for kernel in kernels]
        sites = remembered_sites(list(parts), targets, list(homes))
        if sites is None:
            log = SearchLog(targets, list(homes))
            found = find_call_sites(parts, lambda value: kernel_of(value) is not None, homes, log)
            sites = [site for site, _ in found]
            if not _PATCHED_SITES:  # else the references are those of another mode
                log.finish(sites)
                remember(next(iter(parts)), log)
        if sites:
            _MODES.append(mode)
        for site in sites:
            value = site.get()
            kernel = kernel_of(value)
            if kernel is not None and type(value) is not _PatchedKernel:  # else another mode has patched it
                site.put(_PatchedKernel(value, kernel))
                _PATCHED_SITES.append(site)
    try:
        yield
    finally:
        with _LOCK:
            if sites:
                _MODES.remove(mode)
            while _PATCHED_SITES and not _MODES:
                site = _PATCHED_SITES.pop()
                if isinstance(value := site.get(), _PatchedKernel):  # else the model has replaced it
                    site.put(value.func)


class _Running(threading.local):
    """True while a kernel runs in this thread: kernels that it calls are parts of it."""

    kernel = False


_RUNNING = _Running()
_LOCK = threading.Lock()
_MODES: list[KernelMode] = []
_PATCHED_SITES: list[CallSite] = []


class _PatchedKernel:
    """A kernel whose calls are also reported to the open modes."""

    def __init__(self, called: Callable[..., Any], kernel: Kernel) -> None:
        self.func, self.kernel = called, kernel
        setattr(self, torch_internals.COMPILED_FUNCTION, called)  # torch.compile uses this one instead

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a patched model calls the original kernel."""
        return copy.deepcopy(self.func, memo)

    def __reduce__(self) -> Any:
        function: Any = self.kernel.function
        if self.func is not function:
            return functools.partial, (self.func,)
        return pkgutil.resolve_name, (f"{function.__module__}:{function.__qualname__}",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passes = is_compiling() or _RUNNING.kernel
        modes = [] if passes else [mode for mode in tuple(_MODES) if mode.is_inside]
        if not modes:
            return self.func(*args, **kwargs)
        if in_functorch():
            for mode in modes:
                mode.note_transform()
            return self.func(*args, **kwargs)
        if any(mode.is_observer for mode in modes):
            check_not_nested(*args, **kwargs)
        with ExitStack() as stack:
            for mode in modes:  # a compiled function would be compiled again for an active mode
                stack.enter_context(inactive(mode))
            _RUNNING.kernel = True
            stack.callback(setattr, _RUNNING, "kernel", False)
            result = self.func(*args, **kwargs)
            out = _first(result)
            run = KernelRun(self.kernel, self.func, args, kwargs, out)
            for mode in sorted(modes, key=lambda mode: mode.is_observer):  # observers see the final output
                out = mode.observe_kernel(run, out)
        return out if isinstance(result, Tensor) else (out, *result[1:])


def _first(result: Any) -> Tensor:
    """Return the output of a kernel that may return more beside it."""
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first


def _all_arguments(called: Any, kernel: Kernel, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with those that a `functools.partial` has fixed."""
    while called is not kernel.function:
        if isinstance(called, functools.partial):
            args, kwargs = (*called.args, *args), {**called.keywords, **kwargs}
        called = _inner_callable(called)
    return args, kwargs


def _is_compiled(called: Any, kernel: Kernel) -> bool:
    """True if the callable is a compiled kernel, with arguments fixed or not."""
    while isinstance(called, (functools.partial, staticmethod)):
        called = _inner_callable(called)
    return called is not kernel.function


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def original_function(value: Any) -> Any:
    """Return the original object."""
    return value.func if isinstance(value, _PatchedKernel) else value


def _inner_callable(value: Any) -> Any:
    """Return the callable within a compiled, partial or patched one; None for any other."""
    kind = type(value)
    if issubclass(kind, (functools.partial, _PatchedKernel)):
        return value.func
    if issubclass(kind, staticmethod):
        return value.__func__
    if not issubclass(kind, FunctionType):
        return None
    inlined = value.__globals__.get("__name__") == INLINED
    return value.__dict__.get("__wrapped__" if inlined else torch_internals.COMPILED_FUNCTION)


def is_active(mode: Any) -> bool:
    """True if a torch function mode is on the stack of this thread."""
    return mode in torch_internals.function_mode_stack()


def remove_mode(mode: Any) -> list[Any]:
    """Take a mode off the stack of this thread; return the modes above it, which stay."""
    above: list[Any] = []
    while (top := torch_internals.pop_function_mode()) is not mode:
        above.insert(0, top)
    for each in above:
        torch_internals.push_function_mode(each)
    return above


@contextmanager
def inactive(mode: Any) -> Iterator[None]:
    """Take a mode off the stack of this thread within the block."""
    if not is_active(mode):
        yield
        return
    above = remove_mode(mode)
    try:
        yield
    finally:
        for _ in above:
            torch_internals.pop_function_mode()
        for each in (mode, *above):
            torch_internals.push_function_mode(each)
