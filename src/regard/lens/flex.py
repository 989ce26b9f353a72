"""PyTorch's `flex_attention`: seen where the code of a layer calls it, compiled or as it is.

A compiled function shows nothing while it runs, so it is seen from where it is called: whatever the code of the model's
layers finds under a name, in an attribute or in a closure, and is `flex_attention` or made of it, is exchanged for a
function that calls it and shows what it was called with. The kernel that runs is the model's own.

Its `mask_mod` and its `score_mod` become terms: a function that adds numbers to the scores, -inf among them, is read as
a mask and a bias are; one that bounds them by a tanh is a cap.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .doors import Door, doors, may_lead_somewhere
from .modes import aside
from .mods import Mod, by_blocks, rows_of
from .reading import Numbers
from .watch import must_hold_numbers

NAME = f"{flex_attention.__module__}:{flex_attention.__name__}"
SIGNATURE = inspect.signature(flex_attention)
INLINED = "torch._dynamo.external_utils"  # where what is compiled, and is no function itself, is made one
LARGE = 1e3  # a score that any cap has bounded
SCORES = (1.7, -2.9, LARGE, -LARGE)  # those a score_mod is tried on
CLOSE = 1e-3  # how far a tanh may be off, as kernels approximate it


class Watcher(Protocol):
    """A mode that is shown calls of flex_attention while a layer it looks at is under way."""

    @property
    def is_inside(self) -> bool:
        """Is such a layer under way in this thread?"""

    def flexible(self, out: Tensor, told: Callable[[], list[dict[str, Any]]]) -> Tensor:
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


def told(given: dict[str, Any]) -> list[dict[str, Any]]:
    """What a `Reader` is to be told of a call; nothing if its score_mod does something that is no term.

    Fused kernels skip the blocks that a block mask leaves out, others ask its function about every pair: where that
    makes a difference there are two answers, and the output tells which is true.
    """
    blocks: BlockMask | None = given["block_mask"]
    if blocks is None:
        ways: list[Mod | None] = [None]
    else:
        shape = (*given["query"].shape[:3], given["key"].shape[2])
        fused, asked = by_blocks(blocks), blocks.mask_mod
        one, other = (rows_of(mod, shape, given["query"].device) for mod in (fused, asked))
        same = all(bool((part == other.block(start, start + part.shape[2])).all()) for start, part in one.blocks())
        ways = [asked] if same else [fused, asked]
    calls = [_told(given, mask) for mask in ways]
    return [call for call in calls if call is not None]


def _told(given: dict[str, Any], shown: Mod | None) -> dict[str, Any] | None:
    """As `told`, where the pairs that are not hidden are these."""
    q, k, v, blocks = (given[name] for name in ("query", "key", "value", "block_mask"))
    call = {"q": q, "k": k, "v": v, "scale": given["scale"], "mask": blocks}
    score_mod: Callable[..., Tensor] | None = given["score_mod"]
    if score_mod is None and (shown is None or shown is blocks.mask_mod):
        return call
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32  # of scores, whatever is added

    def made_of(score: float) -> Mod:
        def pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            full = torch.full_like(j, score, dtype=dtype)
            value = full if score_mod is None else score_mod(full, b, h, i, j)
            return value if shown is None else torch.where(shown(b, h, i, j), value, -torch.inf)

        return pair

    rows = {score: rows_of(made_of(score), (*q.shape[:3], k.shape[2]), q.device) for score in (0.0, *SCORES)}

    def become(change: Callable[[float], float], close: float) -> bool:
        """Is every score s made what is added to a score of 0, and change(s)?"""
        return all(
            torch.allclose(
                rows[score].block(start, start + zero.shape[2]), zero + change(score), rtol=close, atol=close
            )
            for start, zero in rows[0.0].blocks()
            for score in SCORES
        )

    call["mask"] = Numbers(made_of(0.0))
    if become(lambda score: score, 1e-5):
        return call
    most = (rows[LARGE].block(start, start + zero.shape[2]) - zero for start, zero in rows[0.0].blocks())
    cap = max((float(x.nan_to_num(nan=0.0).max()) for x in most), default=0.0)
    return {**call, "cap": cap} if cap > 0 and become(lambda score: cap * math.tanh(score / cap), CLOSE) else None


def _is_flex(value: Any) -> bool:
    """Is it flex_attention, compiled, or with some arguments fixed?"""
    while value is not None and value is not flex_attention:
        value = _made_of(value)
    return value is flex_attention


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
