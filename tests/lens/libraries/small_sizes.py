"""Write a case as one row: a class of a library, its inputs, and the arguments beside the usual small sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import nn

from .case import Case, Inputs

Sizes = Mapping[str, object]


class Row(NamedTuple):
    """A class by its path, as `package.module:Class`, and how it differs from others."""

    path: str
    inputs: Callable[[], Inputs]
    name: str
    options: dict[str, Any]  # of the case
    changes: Sizes  # arguments of the class


def row(
    path: str,
    inputs: Callable[[], Inputs],
    *changes: Sizes,
    name: str = "",
    call: Callable[..., Any] | None = None,
    batched: bool = True,
    **more: object,
) -> Row:
    """Return a row with these changes and more; its name is that of the class unless one is given."""
    changed = {key: value for each in (*changes, more) for key, value in each.items()}
    return Row(path, inputs, name or path.rpartition(":")[2], {"call": call, "batched": batched}, changed)


def table(sizes: Sizes, *rows: Row) -> Callable[[], Iterator[Case]]:
    """Return a function that lists the cases of a library; it raises ImportError if the library is not installed."""

    def cases() -> Iterator[Case]:
        for path, inputs, name, options, changes in rows:
            build = partial(small, resolve_name(path), sizes, changes)
            yield Case(name=name, build=build, inputs=inputs, **options)

    return cases


def small(kind: Callable[..., nn.Module], sizes: Sizes, changes: Sizes) -> nn.Module:
    """Call a class with its changes, and with the sizes that its signature names."""
    known = inspect.signature(kind).parameters
    return kind(**{name: size for name, size in sizes.items() if name in known} | changes)


def drawn(**given: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that makes inputs by name: a tuple of numbers is the shape of a random tensor."""

    def make(x: Any) -> Any:
        return torch.randn(x) if isinstance(x, tuple) and all(isinstance(n, int) for n in x) else x

    return lambda: {name: make(x) for name, x in given.items()}
