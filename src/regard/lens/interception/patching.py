"""Kernels that are seen where they are called, for while they run they show nothing.

Whatever the code of a model's layers finds under a name, in an attribute or in a closure, and is a kernel or made of
one, is exchanged for a function that calls it and shows what it was called with. The kernel that runs is the model's
own.
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
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..recording.observed import ObservedAttention
from ..recording.store import check_holds_numbers
from ..terms.interpret import Reader
from .call_sites import Door, doors
from .mode_stack import aside

INLINED = "torch._dynamo.external_utils"  # where what is compiled, and is no function itself, is made one


class Unread(Exception):
    """Why a call of a kernel cannot be put in terms."""


class Layout(NamedTuple):
    """Where heads stand in an output."""

    heads: Callable[[Tensor], Tensor]  # b h i e of it
    put: Callable[[Tensor], Tensor]  # it of b h i e


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """A function that attends, and how what it is called with is read."""

    function: Callable[..., Any]
    homes: tuple[ModuleType, ...]  # where code that imports it within itself finds it
    # What a reader may be told, or `Unread`, of its arguments, and of whether it was compiled.
    told: Callable[[dict[str, Any], bool, Reader], list[dict[str, Any]]]
    layout: Callable[[Tensor], Layout]  # of its output
    # Whether the kernel's output, b h i e, agrees with this reading of its arguments, one of n readings.
    explained: Callable[[ObservedAttention, Tensor, int], bool]
    otherwise: str  # what is said where no reading is that
    dropout: str | None = None  # the argument that says how much is dropped


@dataclass(frozen=True, eq=False)
class Shown:
    """A call of a kernel that has run."""

    kernel: Kernel
    given: inspect.BoundArguments
    compiled: bool
    returned: Tensor
    out: Tensor  # which somebody else who watches may have changed

    def readings(self, reader: Reader) -> list[dict[str, Any]]:
        """What a reader may be told of it; raises `Unread` where there is nothing it could be."""
        return self.kernel.told(dict(self.given.arguments), self.compiled, reader)

    def is_explained(self, seen: ObservedAttention, readings: int) -> bool:
        """Does the kernel return what these weights make of the values? They are one of so many readings."""
        whole = self._undropped()
        return self.kernel.explained(seen, self.kernel.layout(whole).heads(whole), readings)

    def heads(self, x: Tensor) -> Tensor:
        """b h i e of the output, or of its gradient."""
        return self.kernel.layout(x).heads(x)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The output after a change of its heads, b h i e."""
        layout = self.kernel.layout(self.out)
        return layout.put(change(layout.heads(self.out)))

    def _undropped(self) -> Tensor:
        """What is returned where nothing is dropped: what was, unless something is, else the kernel is asked again."""
        name, given = self.kernel.dropout, self.given
        if name is None or not given.arguments.get(name):
            return self.returned.detach()
        again = inspect.BoundArguments(given.signature, OrderedDict(given.arguments | {name: 0.0}))
        with torch.no_grad(), torch.random.fork_rng([self.out.device] if self.out.is_cuda else []):
            return _first(self.kernel.function(*again.args, **again.kwargs))


class Watcher(Protocol):
    """A mode that is shown calls of kernels while a layer it looks at is under way."""

    @property
    def is_inside(self) -> bool:
        """Is such a layer under way in this thread?"""

    def shown(self, call: Shown) -> Tensor:
        """Take in a call that has run; return its output, or what it is to be."""


@contextmanager
def exchanging(watch: Watcher, parts: Collection[nn.Module], kernels: Collection[Kernel]) -> Iterator[None]:
    """Show the calls of these kernels within the block."""
    known = {id(kernel.function): kernel for kernel in kernels}
    homes = tuple(dict.fromkeys(home for kernel in kernels for home in kernel.homes))

    def kernel_of(value: Any) -> Kernel | None:
        """The kernel that it is, also if it was compiled, or has some arguments fixed."""
        while value is not None and id(value) not in known:
            value = _made_of(value)
        return None if value is None else known[id(value)]

    with _LOCK:  # one at a time, for what is found may be exchanged already
        found = list(doors(parts, lambda value: kernel_of(value) is not None, homes))
        if found:
            _WATCHES.append(watch)
        for door, value in found:
            kernel = kernel_of(value)
            if kernel is not None and not isinstance(value, _Seeing):  # as it is where somebody watches already
                door.put(_Seeing(value, kernel))
                _EXCHANGED.append(door)
    try:
        yield
    finally:
        with _LOCK:
            if found:
                _WATCHES.remove(watch)
            while _EXCHANGED and not _WATCHES:
                door = _EXCHANGED.pop()
                if isinstance(there := door.get(), _Seeing):  # and nothing that was put there since
                    door.put(there.func)


class _Here(threading.local):
    """Is a kernel under way in this thread? Others that it calls are a part of it."""

    within = False


_HERE = _Here()
_LOCK = threading.Lock()
_WATCHES: list[Watcher] = []
_EXCHANGED: list[Door] = []


class _Seeing:
    """A call of a kernel that also shows what it is called with to whoever watches the layer."""

    def __init__(self, called: Callable[..., Any], kernel: Kernel) -> None:
        self.func, self.kernel = called, kernel
        self._torchdynamo_orig_callable = called  # what torch.compile takes instead

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a watched model calls what the model called before."""
        return copy.deepcopy(self.func, memo)

    def __reduce__(self) -> Any:
        itself: Any = self.kernel.function
        if self.func is not itself:
            return functools.partial, (self.func,)
        return pkgutil.resolve_name, (f"{itself.__module__}:{itself.__qualname__}",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unseen = is_compiling() or _HERE.within
        watches = [] if unseen else [watch for watch in tuple(_WATCHES) if watch.is_inside]
        if not watches:
            return self.func(*args, **kwargs)
        check_holds_numbers(*args, **kwargs)
        with ExitStack() as stack:
            for watch in watches:  # a compiled function would be compiled anew for a mode
                stack.enter_context(aside(watch))
            _HERE.within = True
            stack.callback(setattr, _HERE, "within", False)
            out = self.func(*args, **kwargs)
            returned = first = _first(out)
            given, compiled = _bound(self.func, self.kernel, args, kwargs), _is_compiled(self.func, self.kernel)
            for watch in watches:
                first = watch.shown(Shown(self.kernel, given, compiled, returned, first))
        return first if isinstance(out, Tensor) else (first, *out[1:])


def _first(out: Any) -> Tensor:
    """The output, where more is returned beside it."""
    first: Tensor = out if isinstance(out, Tensor) else out[0]
    return first


def _bound(called: Any, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """All arguments of a call, those that were fixed before among them."""
    while called is not kernel.function:
        if isinstance(called, functools.partial):
            args, kwargs = (*called.args, *args), {**called.keywords, **kwargs}
        called = _made_of(called)
    given = _signature(kernel.function).bind(*args, **kwargs)
    given.apply_defaults()
    return given


def _is_compiled(called: Any, kernel: Kernel) -> bool:
    """Is what is called, with some arguments fixed or not, compiled?"""
    while isinstance(called, (functools.partial, staticmethod)):
        called = _made_of(called)
    return called is not kernel.function


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def itself(value: Any) -> Any:
    """What is there where nobody watches."""
    return value.func if isinstance(value, _Seeing) else value


def _made_of(value: Any) -> Any:
    """What a function calls that was compiled, has arguments fixed, or is watched; None of any other."""
    if isinstance(value, (functools.partial, _Seeing)):
        return value.func
    if isinstance(value, staticmethod):
        return value.__func__
    if not isinstance(value, FunctionType):
        return None
    inlined = value.__globals__.get("__name__") == INLINED
    return value.__dict__.get("__wrapped__" if inlined else "_torchdynamo_orig_callable")
