"""PyTorch's `flex_attention`: seen where the code of a layer calls it, compiled or as it is.

A compiled function shows nothing while it runs, so it is seen from where it is called: whatever the code of the model's
layers finds under a name, in an attribute or in a closure, and is `flex_attention` or made of it, is exchanged for a
function that calls it and shows what it was called with. The kernel that runs is the model's own.

Its `mask_mod` and its `score_mod` become terms: a function that adds numbers to the scores, -inf among them, is read as
a mask and a bias are; one that bounds them by a tanh is a cap.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CellType, CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .classes import functions
from .modes import aside
from .mods import Mod, rows_of
from .reading import Numbers
from .watch import must_hold_numbers

OTHERS = ("torch.", "transformers.", "regard.")  # whose layers do not call it, or by an interface that is watched
SIGNATURE = inspect.signature(flex_attention)
INLINED = "torch._dynamo.external_utils"  # where what is compiled, and is no function itself, is made one
ROWS = 8  # of a score_mod that are looked at, to see what it does
SCORES = (0.0, 1.7, -2.9)  # scores it is tried on
LARGE = 1e6  # one that any cap has bounded
CLOSE = 1e-3  # how far a tanh may be off, as kernels approximate it

Put = Callable[[Any], None]  # sets a value where it was found


class Watcher(Protocol):
    """A mode that is shown calls of flex_attention while a layer it looks at is under way."""

    @property
    def is_inside(self) -> bool:
        """Is such a layer under way in this thread?"""

    def flexible(self, out: Tensor, told: Callable[[], dict[str, Any] | None]) -> Tensor:
        """Take in a call that has run; return its output, or what it is to be."""


def watching(watch: Watcher, parts: Collection[nn.Module]) -> AbstractContextManager[None]:
    """Show the calls of flex_attention within the block; nothing to do where no layer's code makes any."""
    kinds = _that_may_call(frozenset(map(type, parts)))
    return _exchanging(watch, [*_doors(parts, kinds)]) if kinds else NOTHING


@contextmanager
def _exchanging(watch: Watcher, doors: list[tuple[Any, Put]]) -> Iterator[None]:
    with _LOCK:
        _WATCHES.append(watch)
        for value, put in doors:
            if not isinstance(value, _Seeing):  # as it is where somebody watches already
                put(_Seeing(value))
                _EXCHANGED.append((value, put))
    try:
        yield
    finally:
        with _LOCK:
            _WATCHES.remove(watch)
            while _EXCHANGED and not _WATCHES:
                value, put = _EXCHANGED.pop()
                put(value)


NOTHING = nullcontext()
_LOCK = threading.Lock()
_WATCHES: list[Watcher] = []
_EXCHANGED: list[tuple[Any, Put]] = []  # what was where before anybody watched


class _Seeing:
    """A call of flex_attention that also shows what it is called with to whoever watches the layer."""

    def __init__(self, called: Callable[..., Any]) -> None:
        self.func = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watches = [] if is_compiling() else [watch for watch in _WATCHES if watch.is_inside]
        if not watches:
            return self.func(*args, **kwargs)
        must_hold_numbers(*args, **kwargs)
        with ExitStack() as stack:
            for watch in watches:  # a compiled function would be compiled anew for a mode
                stack.enter_context(aside(watch))
            out = self.func(*args, **kwargs)
        tell = functools.partial(told, _bound(self.func, args, kwargs))
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


def told(given: dict[str, Any]) -> dict[str, Any] | None:
    """What a `Reader` is to be told of a call; None if its score_mod does something that is no term."""
    q, k, v, blocks = (given[name] for name in ("query", "key", "value", "block_mask"))
    call = {"q": q, "k": k, "v": v, "scale": given["scale"], "mask": blocks}
    score_mod: Callable[..., Tensor] | None = given["score_mod"]
    if score_mod is None:
        return call

    def made_of(score: float) -> Mod:
        return lambda b, h, i, j: score_mod(torch.tensor(score, device=q.device), b, h, i, j)

    def becomes(score: float) -> Tensor:
        rows = rows_of(made_of(score), (*q.shape[:3], k.shape[2]), q.device)
        some = torch.linspace(0, q.shape[2] - 1, min(ROWS, q.shape[2])).round().int().tolist()
        return torch.cat([rows.block(row, row + 1) for row in some], 2)

    found = {score: becomes(score) for score in SCORES}
    if all(torch.allclose(found[score], found[0.0] + score, rtol=1e-5, atol=1e-5) for score in SCORES):
        return {**call, "mask": Numbers(_shown(made_of(0.0), blocks))}
    cap = float(becomes(LARGE).max())
    bounded = [torch.full_like(found[score], cap * math.tanh(score / cap)) for score in SCORES] if cap > 0 else []
    if bounded and all(map(functools.partial(torch.allclose, rtol=CLOSE, atol=CLOSE), found.values(), bounded)):
        return {**call, "cap": cap}
    return None


def _shown(added: Mod, blocks: BlockMask | None) -> Mod:
    """What is added to the score of a pair, -inf where it is hidden."""
    if blocks is None:
        return added
    return lambda b, h, i, j: torch.where(blocks.mask_mod(b, h, i, j), added(b, h, i, j), -torch.inf)


def _doors(parts: Iterable[nn.Module], kinds: Collection[type]) -> Iterator[tuple[Any, Put]]:
    """Wherever the code of layers finds flex_attention, or something made of it: that, and what puts another there."""
    looked_at: set[Any] = set()
    for part in parts:
        if type(part) in kinds:
            yield from _held_by(vars(part), vars(part), looked_at)
    # Functions, and the package of the layer whose code leads to them.
    waiting = [(fn, _package(fn)) for kind in kinds for fn in functions(kind)]
    for fn, package in waiting:  # which grows meanwhile
        if fn in looked_at or _package(fn) != package:
            continue
        looked_at.add(fn)
        names = set(_names(fn.__code__))
        yield from _held_by(fn.__globals__, names, looked_at)
        if flex_attention.__name__ in names:  # it may be asked of its module
            yield from _held_by(vars(module), (flex_attention.__name__,), looked_at)
        others = [fn.__globals__.get(name) for name in names]
        for cell in fn.__closure__ or ():
            others.append(value := _inside(cell))
            if _is_flex(value):
                yield value, functools.partial(setattr, cell, "cell_contents")
        waiting.extend((other, package) for other in others if isinstance(other, FunctionType))


@functools.cache
def _that_may_call(kinds: frozenset[type]) -> frozenset[type]:
    return frozenset(kind for kind in kinds if not kind.__module__.startswith(OTHERS))


def _held_by(holder: dict[str, Any], names: Iterable[str], looked_at: set[Any]) -> Iterator[tuple[Any, Put]]:
    for name in names:
        value = holder.get(name)
        if isinstance(value, CALLED) and _is_flex(value) and (id(holder), name) not in looked_at:
            looked_at.add((id(holder), name))
            yield value, functools.partial(holder.__setitem__, name)


def _package(fn: FunctionType) -> str:
    return (fn.__module__ or "").partition(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    """Names in the code of a function, and of those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _inside(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _is_flex(value: Any) -> bool:
    """Is it flex_attention, compiled, or with some arguments fixed?"""
    while value is not None and value is not flex_attention:
        value = _made_of(value)
    return value is flex_attention


def _made_of(value: Any) -> Any:
    """What a function calls that was compiled, has arguments fixed, or is watched; None of any other."""
    if isinstance(value, (functools.partial, _Seeing)):
        return value.func
    if not isinstance(value, FunctionType):
        return None
    inlined = value.__globals__.get("__name__") == INLINED
    return value.__dict__.get("__wrapped__" if inlined else "_torchdynamo_orig_callable")


CALLED = (FunctionType, functools.partial, _Seeing)
