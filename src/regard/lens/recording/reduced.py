"""Reduced: the measures of an attention whose queries and keys were not kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.blocks.pool_bins import Axis
from ...ops.weights import MAP, Weights
from .store import KeptTensor, Store

ROWS = ("entropy", "received", "max", "distance")


class Reduced:
    """The kept measures under the names `Weights` has them by: `A.entropy()`, `A.pool(512, 512)`, ...

    What was not kept raises and says what was.
    """

    def __init__(self, shape: torch.Size, measures: Mapping[str, KeptTensor]) -> None:
        self.shape = shape
        self._measures = dict(measures)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of what was kept."""
        return tuple(self._measures)

    @property
    def maps(self) -> list[str]:
        """Those of them that are maps."""
        return [name for name in self.kept if name.startswith("pool:")]

    def axes(self, name: str) -> tuple[Axis, Axis]:
        """The bins of a map."""
        return _even(self.shape, name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Weights, name):
            raise AttributeError(f"{name} {self._lost()}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _lost(self) -> str:
        return f"is of single weights, and only {', '.join(self.kept)} were kept; leave keep= out of capture"

    def __getitem__(self, name: str) -> Tensor:
        """A measure by the name it was asked for with: `A["pool:64"]`."""
        if not isinstance(name, str):
            raise TypeError(f"A[{name!r}] {self._lost()}")
        if name not in self._measures:
            raise KeyError(f"{name!r} was not kept, only {', '.join(self.kept)}; add it to capture(model, keep=[...])")
        return self._measures[name].get()

    def entropy(self) -> Tensor:
        """-sum_j A log A of each query: `b h i`."""
        return self["entropy"]

    def received(self) -> Tensor:
        """The attention each key receives: `b h j`."""
        return self["received"]

    def max(self) -> Tensor:
        """The largest weight of each query: `b h i`."""
        return self["max"]

    def distance(self) -> Tensor:
        """How far each query looks: `b h i`."""
        return self["distance"]

    def pool(self, rows: int, cols: int) -> Tensor:
        """The map of the resolution that was kept: `b h rows cols`."""
        for name in self.maps:
            if self[name].shape[2:] == (rows, cols):
                return self[name]
        return self[f"pool:{rows}"]

    def __repr__(self) -> str:
        return f"Reduced({' x '.join(map(str, self.shape))}, {', '.join(self.kept)})"


def reduce(A: Weights, keep: Sequence[str], store: Store, what: str) -> Reduced:
    """Measure at once and put away the results."""
    values = {}
    together = [name for name in keep if name in ROWS or name == f"pool:{MAP}"]
    summary = A.summary_in(*_even(A.shape, f"pool:{MAP}")) if len(together) > 1 else None
    for name in keep:
        if summary is not None and name in together:
            values[name] = summary.map if name.startswith("pool:") else getattr(summary, name)
        elif name in ROWS:
            values[name] = getattr(A, name)()
        else:
            rows, cols = _even(A.shape, name)
            values[name] = A.pool(rows.count, cols.count)
    return Reduced(A.shape, {name: store.put(x, f"{what}: {name}") for name, x in values.items()})


def _even(shape: torch.Size, name: str) -> tuple[Axis, Axis]:
    """The bins of `pool:N`, of which there are no more than entries."""
    rows, cols = (Axis.even(n, max(1, min(int(name.removeprefix("pool:")), n))) for n in shape[-2:])
    return rows, cols


def check_measures(keep: Sequence[str]) -> None:
    """Raise unless each name is a measure that can be kept."""
    if isinstance(keep, str):
        raise TypeError(f"keep must be a list of measures, got the string {keep!r}; write keep=[{keep!r}]")
    for name in keep:
        number = name.removeprefix("pool:") if isinstance(name, str) else ""
        if name not in ROWS and not (number != name and number.isdecimal() and int(number)):
            raise ValueError(f"keep takes {', '.join(ROWS)} and pool:N, such as 'pool:512', got {name!r}")
    if not keep:
        raise ValueError("keep must name at least one measure; leave it out to keep queries and keys")
