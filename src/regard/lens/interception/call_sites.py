"""Find every reference to a kernel reachable from a model's code (globals, closures, attributes), so it can be patched.

The search follows names in the code of layers, closures, attributes of layers and of their classes, and the helper
functions, objects, dicts and lists that it meets. It does not follow code of PyTorch, of transformers, of the standard
library and of libraries without attention, nor compiled code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ... import torch_internals

OTHERS = frozenset(("torch", "transformers", "regard", "numpy"))  # their code is never patched
# Libraries of files, networks and numbers, whose code has no attention of PyTorch.
WITHOUT_ATTENTION = frozenset(
    (
        *(
            "huggingface_hub",
            "safetensors",
            "gguf",
            "tokenizers",
            "fsspec",
            "filelock",
            "yaml",
            "PIL",
            "tqdm",
            "psutil",
        ),
        *("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "requests", "h11", "anyio", "certifi", "idna"),
        *("truststore", "charset_normalizer", "packaging", "scipy", "pandas", "matplotlib", "sklearn"),
        *("numba", "llvmlite"),
    )
)
FOREIGN = OTHERS | WITHOUT_ATTENTION | sys.stdlib_module_names
PLAIN = frozenset((int, float, bool, str, bytes, type(None), Tensor, nn.Parameter))  # types that refer to no function
FOLLOWED = (
    FunctionType,
    MethodType,
    ModuleType,
    staticmethod,
    classmethod,
    property,
    functools.partial,
    dict,
    list,
    type,
)
OWN = frozenset(vars(nn.Module()))  # attributes of every nn.Module
MAX_OBJECT_DEPTH = 2  # objects within objects that are searched
MAX_CONTAINER_LENGTH = 64  # longer lists and dicts are not searched


class CallSite(NamedTuple):
    """A reference that can be replaced: a key of a dict or list, or an attribute of a class or closure cell."""

    holder: Any
    name: Any

    def get(self) -> Any:
        """Return the current value; None if the key or attribute is gone, or the closure cell is empty."""
        with suppress(LookupError, AttributeError, ValueError):
            if isinstance(self.holder, (dict, list)):
                return self.holder[self.name]
            if isinstance(self.holder, type):  # a static method as it is
                return vars(self.holder)[self.name]
            return getattr(self.holder, self.name)
        return None

    def put(self, value: Any) -> None:
        """Replace the value."""
        if isinstance(self.holder, (dict, list)):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)


@functools.cache
def has_searchable_code(kinds: frozenset[type]) -> bool:
    """True if one of the layer classes has code that the search follows."""
    return any(_root(kind) not in OTHERS for kind in kinds)


class ReadingLog(Protocol):
    """Takes note of everything that a search reads; containers are read with what holds them."""

    def note_lookup(self, holder: dict[str, Any], names: Iterable[str]) -> None:
        """Note that these names were looked up in a dict."""

    def note_owner(self, owner: Any) -> None:
        """Note that all attributes of a class or object were read."""

    def note_function(self, function: FunctionType) -> None:
        """Note that the code, the closure and the keyword defaults of a function were read."""


def is_searched(part: nn.Module) -> bool:
    """True if the search follows the attributes of a layer."""
    return _root(type(part)) not in OTHERS


def find_call_sites(
    parts: Iterable[nn.Module],
    wanted: Callable[[Any], bool],
    homes: Collection[ModuleType],
    log: ReadingLog | None = None,
) -> Iterator[tuple[CallSite, Any]]:
    """Yield each reference to a wanted value and the value; `homes` are the modules that define wanted values."""
    met: set[Any] = set()
    waiting: list[tuple[Any, int]] = [(part, 0) for part in parts if is_searched(part)]
    for thing, depth in waiting:  # the list grows during the search
        for site, value in _references_in(thing, homes, met, log):
            if type(value) in PLAIN:
                continue
            if wanted(value):
                if (place := (id(site.holder), site.name)) not in met:
                    met.add(place)
                    yield site, value
                continue
            for other in _objects_to_search(value):
                deeper = 0 if isinstance(other, (FunctionType, type)) else depth + 1
                if id(other) not in met and deeper <= MAX_OBJECT_DEPTH:
                    met.add(id(other))  # the queue keeps it alive, so its id stays unique
                    waiting.append((other, deeper))


def _references_in(
    thing: Any, homes: Collection[ModuleType], met: set[Any], log: ReadingLog | None
) -> Iterator[tuple[CallSite, Any]]:
    """Yield the references that a function, class, object, dict or list holds."""
    kind = type(thing)
    if issubclass(kind, FunctionType):
        yield from _references_of_function(thing, homes, log)
    elif issubclass(kind, list):
        yield from ((CallSite(thing, place), value) for place, value in enumerate(list.copy(thing)))
    elif issubclass(kind, dict):
        yield from ((CallSite(thing, name), value) for name, value in list(dict.items(thing)))
    else:
        if log is not None:
            log.note_owner(thing)
        if issubclass(kind, type):
            yield from ((CallSite(thing, name), value) for name, value in list(vars(thing).items()))
            return
        held = instance_dict(thing) or {}
        yield from ((CallSite(held, name), value) for name, value in list(held.items()) if name not in OWN)
        for base in kind.__mro__:
            if id(base) not in met and _root(base) not in FOREIGN:
                met.add(id(base))
                yield from _references_in(base, homes, met, log)


def _references_of_function(
    fn: FunctionType, homes: Collection[ModuleType], log: ReadingLog | None
) -> Iterator[tuple[CallSite, Any]]:
    """Yield the references of a function: names in its code, closure cells, and keyword defaults."""
    names = _names(fn.__code__)
    modules = [sys.modules.get(name) for name in names]  # modules that it imports when it runs
    read: list[dict[str, Any]] = [sys.modules, *map(vars, homes)]
    for holder in (fn.__globals__, *_vars_of(modules, homes)):
        holders = [holder]
        for each in holders:  # the list grows by modules in modules
            found = [(name, each[name]) for name in names if name in each]
            yield from ((CallSite(each, name), value) for name, value in found)
            holders += [x for x in _vars_of((value for _, value in found), homes) if not any(x is y for y in holders)]
        read += holders
    # It may import the kernel when it runs, or find it by a dotted name.
    for home in map(vars, homes):
        yield from ((CallSite(home, name), home[name]) for name in names if name in home)
    for cell in fn.__closure__ or ():
        yield (site := CallSite(cell, "cell_contents")), site.get()
    yield from ((CallSite(fn.__kwdefaults__, name), value) for name, value in (fn.__kwdefaults__ or {}).items())
    if log is not None:
        log.note_function(fn)
        for each in read:
            log.note_lookup(each, names)


def _vars_of(values: Iterable[Any], homes: Collection[ModuleType]) -> list[dict[str, Any]]:
    modules = [x for x in values if issubclass(type(x), ModuleType)]
    return [vars(x) for x in modules if x in homes or _root_of(x, "__name__") not in FOREIGN]


def _objects_to_search(value: Any) -> Iterator[Any]:
    """Yield the objects within a value that are searched next.

    Its class decides, not what it says of itself: a wrapper of a C library may have an answer to every attribute.
    """
    kind = type(value)
    if issubclass(kind, (staticmethod, classmethod)):
        yield from _objects_to_search(value.__func__)
    elif issubclass(kind, MethodType):
        yield from _objects_to_search(value.__func__)
        yield from _objects_to_search(value.__self__)
    elif issubclass(kind, property):
        yield from _objects_to_search(value.fget)
    elif issubclass(kind, functools.partial):
        yield from _objects_to_search(value.func)
    elif issubclass(kind, FunctionType):
        compiled = torch_internals.COMPILED_FUNCTION in vars(value) and not vars(value).get(
            torch_internals.NOT_COMPILED
        )
        if not compiled and _root_of(value, "__module__") not in FOREIGN:
            yield value
    elif issubclass(kind, dict):
        if dict.__len__(value) <= MAX_CONTAINER_LENGTH:
            yield value
    elif issubclass(kind, list):
        if list.__len__(value) <= MAX_CONTAINER_LENGTH:
            yield value
    elif issubclass(kind, type):
        if _root(value) not in FOREIGN:
            yield value
    elif _root(kind) not in FOREIGN and not issubclass(kind, (nn.Module, Tensor)) and instance_dict(value) is not None:
        yield value


def is_followed(kind: type) -> bool:
    """True if the search may follow a value of this type."""
    if kind in PLAIN or issubclass(kind, (nn.Module, Tensor)):
        return False
    return issubclass(kind, FOLLOWED) or (_root(kind) not in FOREIGN and kind.__dictoffset__ != 0)


def instance_dict(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; None if its class gives it no dict, whatever the object answers."""
    with suppress(Exception):  # a class may have a property of this name
        held = object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else None
        return held if type(held) is dict else None
    return None


def _root(kind: type) -> str:
    return _root_of(kind, "__module__")


def _root_of(value: Any, attribute: str) -> str:
    """Return the package in an attribute that names a module; "" if the attribute is missing or no string."""
    name = getattr(value, attribute, None)
    return name.partition(".")[0] if isinstance(name, str) else ""


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names in the code of a function and of functions nested in it."""
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*within)
