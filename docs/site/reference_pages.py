"""A mkdocs hook: `<!-- names: regard.lens; first: capture, Tape -->` in a page becomes the entry of every public name.

The names are those of `__all__` of the package: first the listed ones, then the others by alphabet. A name that a
submodule hides, as `regard.lens.capture`, is documented where it is defined. `<!-- names: regard; only: attend -->`
shows the listed names alone.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- names: (?P<package>[\w.]+)(?:; (?P<kind>first|only): (?P<listed>[^>]*?))?\s+-->")
LEVEL = 2


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark of a page."""
    return MARK.sub(lambda mark: entries(mark["package"], mark["kind"], listed_names(mark)), markdown)


def listed_names(mark: re.Match[str]) -> list[str]:
    """Return the names that a mark lists."""
    return re.split(r",\s+", mark["listed"].strip()) if mark["listed"] else []


def entries(package: str, kind: str | None = None, listed: list[str] | None = None) -> str:
    """Return the entries of the names of a package, as Markdown."""
    room = importlib.import_module(package)
    names = ordered(room, kind, listed or [])
    paths: dict[str, str] = {}  # of each object that has an entry, the first name
    shown = []
    for name in names:
        value = getattr(room, name)
        anchor = f'<a id="{package}.{name}"></a>'
        path = place(value)
        if path is None:
            shown.append(f"{anchor}\n\n{'#' * (LEVEL + (kind == 'only'))} `{name}`\n\n{constant(room, name)}")
        elif path in paths:
            shown.append(f"{anchor}\n\n{'#' * LEVEL} `{name}`\n\nAn earlier name of `{paths[path]}`.")
        else:
            paths[path] = name
            level = LEVEL + 1 if kind == "only" else LEVEL
            shown.append(f"{anchor}\n\n::: {path}\n    options: {{heading: {name}, heading_level: {level}}}")
    return "\n\n".join(shown)


def ordered(room: ModuleType, kind: str | None, listed: list[str]) -> list[str]:
    """Return the names to show: the listed ones first, classes and functions by alphabet, earlier names last."""
    if unknown := [name for name in listed if name not in room.__all__]:
        raise ValueError(f"{room.__name__} has no public names {', '.join(unknown)}")
    rest = sorted((name for name in room.__all__ if name not in listed), key=lambda name: (is_alias(room, name), name))
    return listed if kind == "only" else [*listed, *rest]


def is_alias(room: ModuleType, name: str) -> bool:
    """Whether a name is an earlier name of an object that another public name has as its own."""
    own = getattr(getattr(room, name), "__name__", name)
    return own != name and own in room.__all__ and getattr(room, own) is getattr(room, name)


def place(value: Any) -> str | None:
    """Return where an object is defined, None for a module and for a constant."""
    if inspect.ismodule(value) or not (inspect.isclass(value) or inspect.isfunction(value)):
        return None
    return f"{value.__module__}.{value.__qualname__}"


def constant(room: ModuleType, name: str) -> str:
    """Return the text of a name that is neither a class nor a function."""
    value = getattr(room, name)
    if inspect.ismodule(value):
        return f"The module [`{value.__name__}`](#{name}): {inspect.getdoc(value)}"
    return f"`{name} = {value!r}`"
