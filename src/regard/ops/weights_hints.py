"""What is asked of weights as if they were a tensor: told what there is instead."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch import Tensor

T = TypeVar("T")

MEASURES = "received(), entropy(), max(), distance(), topk(k), pool(rows, cols), mass(...), summary() and A @ v"


def no_tensor(kind: type[T]) -> type[T]:
    """A class that tells whoever takes it for a tensor what to write."""
    kind.__getattr__ = _missing  # type: ignore[attr-defined]
    return kind


def _missing(self: Any, name: str) -> NoReturn:
    """Called where there is no such attribute, or where a property has raised."""
    if hasattr(type(self), name) or name.startswith("_") or not hasattr(Tensor, name):
        object.__getattribute__(self, name)  # which raises as if this were not here
    raise AttributeError(
        f"{type(self).__name__} has no {name}: the matrix is never stored. It has {MEASURES}; of a small one write "
        f"A.dense().{name}, of a part A[..., :9, :].{name}"
    )
