"""PyTorch's `flex_attention`: seen where the code of a layer calls it, compiled or as it is.

A compiled function shows nothing while it runs, so it is seen from where it is called: whatever the code of the model's
layers finds under a name, in an attribute or in a closure, and is `flex_attention` or made of it, is exchanged for a
function that calls it and shows what it was called with. The kernel that runs is the model's own.

Its `mask_mod` and its `score_mod` become terms (see `meanings`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import flex_attention

from .doors import Door, doors, may_lead_somewhere
from .meanings import meanings
from .modes import aside
from .reading import Reader
from .watch import must_hold_numbers

NAME = f"{flex_attention.__module__}:{flex_attention.__name__}"
SIGNATURE = inspect.signature(flex_attention)
INLINED = "torch._dynamo.external_utils"  # where what is compiled, and is no function itself, is made one


class Watcher(Protocol):
    """A mode that is shown calls of flex_attention while a layer it looks at is under way."""

    @property
    def is_inside(self) -> bool:
        """Is such a layer under way in this thread?"""

    def flexible(self, out: Tensor, told: Callable[[Reader], list[dict[str, Any]]]) -> Tensor:
        """Take in a call that has run; return its output, or what it is to be."""


def watching(watch: Watcher, parts: Collection[nn.Module]) -> AbstractContextManager[None]:
    """Show the calls of flex_attention within the block; nothing to do where no layer's code makes any."""
    return _exchanging(watch, parts) if may_lead_somewhere(frozenset(map(type, parts))) else NOTHING


@contextmanager
def _exchanging(watch: Watcher, parts: Iterable[nn.Module]) -> Iterator[None]:
    with _LOCK:  # one at a time, for what is found may be exchanged already
        found = list(doors(parts, _is_flex, module))
        if found:
            _WATCHES.append(watch)
        for door, value in found:
            if not isinstance(value, _Seeing):  # as it is where somebody watches already
                door.put(_Seeing(value))
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


NOTHING = nullcontext()
_LOCK = threading.Lock()
_WATCHES: list[Watcher] = []
_EXCHANGED: list[Door] = []


class _Seeing:
    """A call of flex_attention that also shows what it is called with to whoever watches the layer."""

    def __init__(self, called: Callable[..., Any]) -> None:
        self.func = called
        self._torchdynamo_orig_callable = called  # what torch.compile takes instead

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a watched model calls what the model called before."""
        return copy.deepcopy(self.func, memo)

    def __reduce__(self) -> Any:
        return (pkgutil.resolve_name, (NAME,)) if self.func is flex_attention else (functools.partial, (self.func,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watches = [] if is_compiling() else [watch for watch in tuple(_WATCHES) if watch.is_inside]
        if not watches:
            return self.func(*args, **kwargs)
        must_hold_numbers(*args, **kwargs)
        with ExitStack() as stack:
            for watch in watches:  # a compiled function would be compiled anew for a mode
                stack.enter_context(aside(watch))
            out = self.func(*args, **kwargs)
            tell = functools.partial(told, _bound(self.func, args, kwargs), _is_compiled(self.func))
            first, *others = (out,) if isinstance(out, Tensor) else out
            for watch in watches:
                first = watch.flexible(first, tell)
        return (first, *others) if others else first


def _bound(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, those that were fixed before among them."""
    while called is not flex_attention:
        if isinstance(called, functools.partial):
            args, kwargs = (*called.args, *args), {**called.keywords, **kwargs}
        called = _made_of(called)
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def told(given: dict[str, Any], fused: bool, reader: Reader) -> list[dict[str, Any]]:
    """What a reader is to be told of a call: one answer, several if its output must decide, or none if there is no
    term for what its functions do."""
    q, k, v, blocks, score_mod = (given[name] for name in ("query", "key", "value", "block_mask", "score_mod"))
    asked = blocks, blocks and blocks.mask_mod, score_mod, (*q.shape[:3], k.shape[2]), q.dtype, q.device, fused
    found = reader.in_this_pass(asked, lambda: meanings(blocks, score_mod, *asked[3:]))
    return [{"q": q, "k": k, "v": v, "scale": given["scale"], **meaning} for meaning in found]


def _is_flex(value: Any) -> bool:
    """Is it flex_attention, compiled, or with some arguments fixed?"""
    while value is not None and value is not flex_attention:
        value = _made_of(value)
    return value is flex_attention


def _is_compiled(value: Any) -> bool:
    """Is what is called, with some arguments fixed or not, compiled?"""
    while isinstance(value, (functools.partial, staticmethod)):
        value = _made_of(value)
    return value is not flex_attention


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
