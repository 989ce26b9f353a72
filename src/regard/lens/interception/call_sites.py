"""Doors: the places where the code of a model's layers finds a function, so that another can be put there.

Followed are names in the code, closures, attributes of layers and of their classes, and what helpers, objects, dicts
and lists found on the way lead to. Code of PyTorch, of transformers and of Python itself is not, nor compiled code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

OTHERS = frozenset(("torch", "transformers", "regard", "numpy"))  # whose code calls it nowhere, or where it is watched
FOREIGN = OTHERS | sys.stdlib_module_names
PLAIN = frozenset((int, float, bool, str, bytes, type(None), Tensor, nn.Parameter))  # lead nowhere
OWN = frozenset(vars(nn.Module()))  # what every layer has
DEEP = 2  # objects within objects that are looked into
LONG = 64  # a list or dict that is too long to hold functions by design


class Door(NamedTuple):
    """A key of a dict or list, or an attribute of a class or cell."""

    holder: Any
    name: Any

    def get(self) -> Any:
        """What is there now; None if nothing is."""
        with suppress(LookupError, AttributeError, ValueError):
            if isinstance(self.holder, (dict, list)):
                return self.holder[self.name]
            return getattr(self.holder, self.name)
        return None

    def put(self, value: Any) -> None:
        """Set what is found there."""
        if isinstance(self.holder, (dict, list)):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)


@functools.cache
def may_lead_somewhere(kinds: frozenset[type]) -> bool:
    """Is there code of such layers to be followed?"""
    return any(_root(kind) not in OTHERS for kind in kinds)


def doors(
    parts: Iterable[nn.Module], wanted: Callable[[Any], bool], homes: Collection[ModuleType]
) -> Iterator[tuple[Door, Any]]:
    """Wherever the code of layers finds something wanted: the place, and what is there; `homes` is where it is from."""
    met: set[Any] = set()
    waiting: list[tuple[Any, int]] = [(part, 0) for part in parts if _root(type(part)) not in OTHERS]
    for thing, depth in waiting:  # which grows meanwhile
        for door, value in _places(thing, homes, met):
            if type(value) in PLAIN:
                continue
            if wanted(value):
                if (place := (id(door.holder), door.name)) not in met:
                    met.add(place)
                    yield door, value
                continue
            for other in _leads_to(value):
                deeper = 0 if isinstance(other, (FunctionType, type)) else depth + 1
                if id(other) not in met and deeper <= DEEP:
                    met.add(id(other))  # as long as it waits it is the only one with this id
                    waiting.append((other, deeper))


def _places(thing: Any, homes: Collection[ModuleType], met: set[Any]) -> Iterator[tuple[Door, Any]]:
    """What code may find in a function, a class, an object, a dict or a list."""
    if isinstance(thing, FunctionType):
        yield from _named(thing, homes)
    elif isinstance(thing, type):
        yield from ((Door(thing, name), value) for name, value in list(vars(thing).items()))
    elif isinstance(thing, list):
        yield from ((Door(thing, place), value) for place, value in enumerate(list(thing)))
    elif isinstance(thing, dict):
        yield from ((Door(thing, name), value) for name, value in list(thing.items()))
    else:
        held = vars(thing)
        yield from ((Door(held, name), value) for name, value in list(held.items()) if name not in OWN)
        for base in type(thing).__mro__:
            if id(base) not in met and _root(base) not in FOREIGN:
                met.add(id(base))
                yield from _places(base, homes, met)


def _named(fn: FunctionType, homes: Collection[ModuleType]) -> Iterator[tuple[Door, Any]]:
    """What a function finds by names, in its closure, and as what it takes unless given."""
    names = _names(fn.__code__)
    modules = [sys.modules.get(name) for name in names]  # what it imports itself
    for holder in (fn.__globals__, *_vars_of(modules, homes)):
        holders = [holder]
        for each in holders:  # which grows meanwhile, by modules in modules
            found = [(name, each[name]) for name in names if name in each]
            yield from ((Door(each, name), value) for name, value in found)
            holders += [x for x in _vars_of((value for _, value in found), homes) if not any(x is y for y in holders)]
    # It may be imported within, or asked of its module by a longer name.
    for home in map(vars, homes):
        yield from ((Door(home, name), home[name]) for name in names if name in home)
    for cell in fn.__closure__ or ():
        yield (door := Door(cell, "cell_contents")), door.get()
    yield from ((Door(fn.__kwdefaults__, name), value) for name, value in (fn.__kwdefaults__ or {}).items())


def _vars_of(values: Iterable[Any], homes: Collection[ModuleType]) -> list[dict[str, Any]]:
    modules = [x for x in values if isinstance(x, ModuleType)]
    return [vars(x) for x in modules if x in homes or x.__name__.partition(".")[0] not in FOREIGN]


def _leads_to(value: Any) -> Iterator[Any]:
    """What of a value there is to look into."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield from _leads_to(value.__func__)
        yield from _leads_to(getattr(value, "__self__", None))
    elif isinstance(value, property):
        yield from _leads_to(value.fget)
    elif isinstance(value, functools.partial):
        yield from _leads_to(value.func)
    elif isinstance(value, FunctionType):
        compiled = "_torchdynamo_orig_callable" in vars(value) and not vars(value).get("_torchdynamo_disable")
        if not compiled and (value.__module__ or "").partition(".")[0] not in FOREIGN:
            yield value
    elif isinstance(value, (dict, list)):
        if len(value) <= LONG:
            yield value
    elif isinstance(value, type):
        if _root(value) not in FOREIGN:
            yield value
    elif (
        _root(type(value)) not in FOREIGN and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor))
    ):
        yield value


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Names in the code of a function, and of those within it."""
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*within)
