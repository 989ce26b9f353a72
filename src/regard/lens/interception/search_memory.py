"""Remember the search for call sites of a model, until a reference that it has read is replaced.

The search follows thousands of references, which takes longer than a forward pass of many models. So each reference
that it read is noted: by identity if the search follows such values, by type if it never does. The next `capture` of
the same model compares the notes, and searches again if one differs. Notes keep no object of the model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import compress
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .call_sites import MAX_CONTAINER_LENGTH, OWN, CallSite, is_followed, is_searched


def remembered_sites(parts: list[nn.Module], targets: list[Any], homes: list[ModuleType]) -> list[CallSite] | None:
    """Return the call sites that an earlier search of the same model found, if a new one would find the same."""
    log = _LOGS.get(parts[0]) if parts else None
    searched = [part for part in parts if is_searched(part)]
    return log.sites if log is not None and log.is_current(searched, targets, homes) else None


def remember(model: nn.Module, log: SearchLog) -> None:
    """Remember the search of a model as long as the model lives, or until the next search."""
    _LOGS[model] = log


class SearchLog:
    """The references that one search for `targets` has read, and the sites it found."""

    def __init__(self, targets: list[Any], homes: list[ModuleType]) -> None:
        self.sites: list[CallSite] = []
        self.is_valid = True
        self._sought = [*targets, *homes]
        self._target_types = frozenset(map(type, targets))
        self._dicts: dict[int, tuple[dict[str, Any], set[str]]] = {}  # id -> a dict, and names looked up in it
        self._lookups: list[tuple[dict[str, Any], list[str], frozenset[str]]] = []  # a dict, names with a value, others
        self._owners: list[Callable[[], Any]] = []
        self._functions: list[FunctionType] = []  # without a closure: they hold their globals alone
        self._closures: list[weakref.ref[FunctionType]] = []
        self._containers: list[tuple[int, Any, bool]] = []  # index among the values, type, and whether it was read
        self._guards: list[Any] = []  # weak references to values that are compared by identity
        # The notes: the names, the types of all values, those that may be kept, and the identity of others.
        self._names: list[str] = []
        self._types: list[type] = []
        self._held: list[Any] = []
        self._ids: list[int] = []
        self._is_held: list[bool] = []
        self._has_id: list[bool] = []

    def note_lookup(self, holder: dict[str, Any], names: Iterable[str]) -> None:
        """Note that these names were looked up in a dict of globals or of a module."""
        self._dicts.setdefault(id(holder), (holder, set()))[1].update(names)

    def note_owner(self, owner: Any) -> None:
        """Note that all attributes of a class or object were read."""
        try:
            self._owners.append(weakref.ref(owner, self._expire))
        except TypeError:
            self._owners.append(lambda: owner)
            # Members of an enumeration live as long as their class; other objects may hold the model.
            self.is_valid = self.is_valid and isinstance(owner, Enum)

    def note_function(self, function: FunctionType) -> None:
        """Note that the code, the closure and the keyword defaults of a function were read."""
        if _holds_globals_alone(function):
            self._functions.append(function)
        else:
            self._closures.append(weakref.ref(function, self._expire))

    def finish(self, sites: list[CallSite]) -> None:
        """Take down what all references are now, before anything is patched."""
        self.sites = sites
        # A site in a list, or in the attributes of an object, would keep what these hold alive.
        if any(isinstance(site.holder, (dict, list)) and id(site.holder) not in self._dicts for site in sites):
            self.is_valid = False
        for holder, looked_up in self._dicts.values():
            present = [name for name in looked_up if name in holder]
            self._lookups.append((holder, present, frozenset(looked_up.difference(present))))
        self._dicts = {}
        try:
            names, values = self._read()
        except ValueError:  # a cell of a closure is empty
            self.is_valid = False
            return
        skipped, met = self._find_skipped(), set[int]()
        for place, value in enumerate(values):  # the list grows by what containers hold
            kind = type(value)
            follows = place not in skipped and self._is_followed(kind)
            if follows and issubclass(kind, (list, dict)) and id(value) not in met:
                met.add(id(value))
                is_read = len(value) <= MAX_CONTAINER_LENGTH
                self._containers.append((place, kind, is_read))
                if is_read:
                    _expand(value, names, values)
            is_held = follows and (kind in (CodeType, ModuleType) or _holds_globals_alone(value))
            self._is_held.append(is_held)
            self._has_id.append(follows and not is_held)
        self._names, self._types = names, list(map(type, values))
        self._held = list(compress(values, self._is_held))
        self._ids = list(map(id, compress(values, self._has_id)))
        for value in compress(values, self._has_id):
            if not isinstance(value, (list, dict)):  # their contents are compared too
                self._guard(value)

    def is_current(self, parts: list[nn.Module], targets: list[Any], homes: list[ModuleType]) -> bool:
        """True if a search of the same parts and targets would read the same again."""
        if not self.is_valid or list(map(id, (*targets, *homes))) != list(map(id, self._sought)):
            return False
        if list(map(id, parts)) != [id(x) for owner in self._owners if isinstance(x := owner(), nn.Module)]:
            return False
        if not all(holder.keys().isdisjoint(absent) for holder, _, absent in self._lookups):
            return False
        try:
            names, values = self._read()
        except ValueError:
            return False
        for place, kind, is_read in self._containers:
            value: Any = values[place] if place < len(values) else None
            if type(value) is not kind or (len(value) <= MAX_CONTAINER_LENGTH) is not is_read:
                return False
            if is_read:
                _expand(value, names, values)
        return (
            names == self._names
            and list(map(type, values)) == self._types
            and list(compress(values, self._is_held)) == self._held
            and list(map(id, compress(values, self._has_id))) == self._ids
        )

    def _read(self) -> tuple[list[Any], list[Any]]:
        """Return the names and values of all references, in the order of the search."""
        names, values = list[Any](), list[Any]()
        for holder, present, _ in self._lookups:
            names += present
            values += map(holder.get, present)
        for owner in self._owners:
            held = vars(owner())
            names += held
            values += held.values()
        values += map(CODE_OF, self._functions)
        for reference in self._closures:
            if (function := reference()) is not None:
                values.append(function.__code__)
                values += map(CONTENTS_OF, function.__closure__ or ())
                values += (function.__kwdefaults__ or {}).values()
        return names, values

    def _find_skipped(self) -> set[int]:
        """Return the places of attributes that every nn.Module has, which the search passes over."""
        place, found = sum(len(present) for _, present, _ in self._lookups), set[int]()
        for owner in (reference() for reference in self._owners):
            attributes = list(vars(owner))
            if not isinstance(owner, type):
                found.update(at for at, name in enumerate(attributes, place) if name in OWN)
            place += len(attributes)
        return found

    def _is_followed(self, kind: type) -> bool:
        """True if the search follows values of this type, or looks for one."""
        return kind is CodeType or kind in self._target_types or is_followed(kind)

    def _guard(self, value: Any) -> None:
        """Refer to a value weakly: its identity is its own as long as the log is valid."""
        try:
            self._guards.append(weakref.ref(value, self._expire))
        except TypeError:  # a property, for example
            self._guards.append(value)

    def _expire(self, _: Any) -> None:
        self.is_valid = False


CODE_OF, CONTENTS_OF = attrgetter("__code__"), attrgetter("cell_contents")
_LOGS = WeakIdKeyDictionary()


def _holds_globals_alone(value: Any) -> bool:
    """True for a function that keeps nothing alive but its globals, which have lookups of their own."""
    return type(value) is FunctionType and not (
        value.__closure__ or value.__kwdefaults__ or value.__defaults__ or value.__dict__
    )


def _expand(container: Any, names: list[Any], values: list[Any]) -> None:
    """Add what a list or dict holds to the values that are compared, and the keys to the names."""
    if isinstance(container, dict):
        names.append(len(container))
        names += map(id, dict.keys(container))
        values += dict.values(container)
    else:
        values += container
