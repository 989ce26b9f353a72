"""Terms: small frozen values that fill the slots of the attention equation; their `repr` is their source."""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor

from ..shape import Sizes

NUMBERS = frozenset((int, float, bool))

T = TypeVar("T")
TermT = TypeVar("TermT", bound="Term")


@dataclass_transform(frozen_default=True)
def term(cls: type[T]) -> type[T]:
    """Make a class a term: frozen fields, and equality and `repr` as `Term` defines them."""
    return dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Term:
    """A frozen value that fills one slot of the equation.

    Made from Python numbers, terms compare and hash by value and `repr` rebuilds them. A term that holds a
    tensor compares by identity, and its `repr` shows dtype and shape.

    >>> from regard import Window
    >>> Window(4) == Window(4), repr(Window(4))
    (True, 'Window(4)')
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__mro__[1:]:
            if base is not Term and base.__module__.startswith("regard.") and "__dataclass_fields__" in vars(base):
                kind = base.__mro__[1].__name__
                raise TypeError(
                    f"{base.__name__} cannot be subclassed: kernels compute it in their own ways, which would ignore "
                    f"what {cls.__name__} changes; write class {cls.__name__}({kind}) with a method of its own, or "
                    "combine terms, as in Causal() & ~Diagonal()"
                )

    def check(self, sizes: Sizes) -> None:
        """Raise `ValueError` if this term does not fit an attention with these sizes."""

    def tensors(self) -> list[Tensor]:
        """Return every tensor the term holds, including the tensors of nested terms."""
        tensors: list[Tensor] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is None or type(value) in NUMBERS:  # most values are, and a short call asks eleven times
                continue
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, Term):
                tensors.extend(value.tensors())
            elif isinstance(value, tuple):
                tensors.extend(x for x in value if isinstance(x, Tensor))
        return tensors

    def map_tensors(self: TermT, fn: Callable[[Tensor], Tensor]) -> TermT:
        """Return a copy of the term with `fn` applied to each of its tensors."""
        if not self.tensors():
            return self
        mapped = copy.copy(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                object.__setattr__(mapped, field.name, fn(value))
            elif isinstance(value, Term):
                object.__setattr__(mapped, field.name, value.map_tensors(fn))
            elif isinstance(value, tuple):
                object.__setattr__(mapped, field.name, tuple(fn(x) if isinstance(x, Tensor) else x for x in value))
        return mapped

    def with_tensors(self: TermT, device: torch.device, dtype: torch.dtype) -> TermT:
        """Return the term with its numbers stored as tensors, for kernels that cannot create tensors."""
        nested = {name: x for name in self.__dataclass_fields__ if isinstance(x := getattr(self, name), Term)}
        return (
            dataclasses.replace(self, **{name: x.with_tensors(device, dtype) for name, x in nested.items()})
            if nested
            else self
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Term) or type(self) is not type(other) or self.tensors() or other.tensors():
            return False
        return self._values() == other._values()

    def __hash__(self) -> int:
        return id(self) if self.tensors() else hash((type(self), *self._values()))

    def __repr__(self) -> str:
        arguments = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            required = field.default is dataclasses.MISSING
            if required:
                arguments.append(_source(value))
            elif isinstance(value, Tensor) or value != field.default:
                arguments.append(f"{field.name}={_source(value)}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def _source(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, Term):
        return repr(value)
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        # The repr of a NumPy number names NumPy; the source is the plain number.
        return repr(int(value) if isinstance(value, numbers.Integral) else float(value))  # type: ignore[arg-type]
    return repr(value)
