"""Frozen dataclasses to and from JSON with a closed schema: an unknown key or a wrong type raises and is named."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..checks import suggest_name

T = TypeVar("T")
KIND = "kind"
UNIONS = (Union, types.UnionType)


def to_json(value: Any) -> Any:
    """Return plain numbers, strings, lists and dicts; a nested dataclass carries its class as `kind`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: int
    >>> to_json(Point(3))
    {'x': 3}
    """
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def from_json(cls: type[T], text: str, *, source: str) -> T:
    """Build an instance from JSON; `source`, the file that holds the text, begins every error message."""
    try:
        return _build(cls, json.loads(text, parse_constant=_no_constant), "")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{source}: {error}") from None


def check_types(instance: Any) -> None:
    """Raise unless every field of a dataclass matches its annotation; whole numbers are accepted as floats."""
    hints = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if not _fits(value, hints[field.name]):
            raise TypeError(f"{field.name} must be {_words(hints[field.name])}, got {value!r}")


def check_left_at_default(instance: Any, *names: str, whose: str, got: str) -> None:
    """Raise if one of these fields, which have no effect here, differs from its default."""
    for field in dataclasses.fields(instance):
        if field.name in names and getattr(instance, field.name) != field.default:
            raise ValueError(f"{field.name} is only for {whose}, got {got}; leave it out")


def stored_name(cls: type) -> str:
    """Return the name of a dataclass in files: its `stored_name`, so that classes can be renamed, or the class name."""
    return str(getattr(cls, "stored_name", cls.__name__))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {KIND: stored_name(type(value)), **to_json(value)}
    return list(value) if isinstance(value, tuple) else value


def _build(cls: type[T], data: Any, at: str) -> T:
    if not isinstance(data, Mapping):
        raise TypeError(f"{at.rstrip('.') or 'the top level'} must be an object of keys and values, got {data!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ValueError(f"unknown key {at + key!r}; {suggest_name(key, fields)}")
    for name, field in fields.items():
        if name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"key {at + name!r} is missing")
    hints = get_type_hints(cls)
    return cls(**{key: _value(value, hints[key], at + key) for key, value in data.items()})


def _value(value: Any, hint: Any, at: str) -> Any:
    members = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    classes: dict[str, type] = {stored_name(cls): cls for cls in members if dataclasses.is_dataclass(cls)}  # type: ignore[misc, arg-type]
    if classes and isinstance(value, Mapping):
        kind = str(value.get(KIND, ""))
        if kind not in classes:
            raise ValueError(f"{at}.{KIND} must name a class, got {kind!r}; {suggest_name(kind, classes)}")
        return _build(classes[kind], {key: x for key, x in value.items() if key != KIND}, at + ".")
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in UNIONS:
        return any(_fits(value, member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        if not isinstance(value, tuple):
            return False
        parts = (first,) * len(value) if rest == [...] else (first, *rest)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in UNIONS:
        return " or ".join(_words(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"({', '.join('...' if part is ... else _words(part) for part in get_args(hint))})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "None"}
    return words.get(hint) or stored_name(hint)


def _no_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, got {name}")
