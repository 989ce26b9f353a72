"""Reduced: the measures that `capture(keep=[...])` keeps instead of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.blocks.pool_bins import Axis, How
from ...ops.weights import MAX_MAP_CELLS, Weights
from ..real_tokens import RealTokens, distance_between, without_queries
from .store import KeptTensor, Store, TensorInMemory

WEIGHT_MEASURES = ("entropy", "received", "max", "distance")
MEASURE_NAMES = (*WEIGHT_MEASURES, "logit")
MAX_HELD_SHARE = 1.5  # memory of results that are kept without a copy, relative to their own size


class Reduced:
    """The kept measures, by the methods of `Weights`: `A.entropy()`, `A.pool(512, 512)`, ...

    A measure that was not kept raises an error that names those that were.
    """

    def __init__(self, shape: torch.Size, measures: Mapping[str, KeptTensor], real: RealTokens | None = None) -> None:
        self.shape = shape
        self.real = RealTokens.all_of(shape) if real is None else real  # without a mask, who is padding must be kept
        self._measures = dict(measures)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the measures that were kept, as they were passed to capture."""
        return tuple(name for name in self._measures if not name.startswith("peaks:"))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors: the measures, and `peaks:N` for each map that was kept with its largest weights."""
        return tuple(self._measures)

    @property
    def maps(self) -> list[str]:
        """The names of the maps among them, such as `pool:512`."""
        return [name for name in self.kept if name.startswith("pool:")]

    def axes(self, name: str) -> tuple[Axis, Axis]:
        """Return the bins of a map."""
        return _map_axes(self.shape, name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Weights, name):
            raise AttributeError(f"{name} {self._reason()}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _reason(self) -> str:
        kept = ", ".join(self.kept)
        return f"needs the full weights, but capture(keep=[...]) kept only {kept}; capture without keep="

    def __getitem__(self, name: str) -> Tensor:
        """Return a measure by the name that was passed to capture: `A["pool:64"]`."""
        if not isinstance(name, str):
            raise TypeError(f"A[{name!r}] {self._reason()}")
        if name not in self._measures:
            raise KeyError(f"{name!r} was not kept, only {', '.join(self.kept)}; add it to capture(model, keep=[...])")
        return self._measures[name].get()

    def entropy(self) -> Tensor:
        """Return -sum_j A log A of each query: `b h i`."""
        return self["entropy"]

    def received(self) -> Tensor:
        """Return the attention that each key receives, from the queries that are real tokens: `b h j`."""
        return self["received"]

    def max(self) -> Tensor:
        """Return the largest weight of each query: `b h i`."""
        return self["max"]

    def distance(self) -> Tensor:
        """Return the mean distance to the keys of each query: `b h i`."""
        return self["distance"]

    def logit(self) -> Tensor:
        """Return the largest score of each query: `b h i`."""
        return self["logit"]

    def pool(self, rows: int, cols: int, how: How = "mean") -> Tensor:
        """Return the map of this resolution if it was kept, `b h rows cols`: the mean or the largest of each cell."""
        if how not in ("mean", "max"):
            raise ValueError(f"how must be 'mean' or 'max', got {how!r}")
        named = next((name for name in self.maps if self[name].shape[2:] == (rows, cols)), f"pool:{rows}")
        return self[named if how == "mean" else peaks_of(named)]

    def release(self) -> None:
        """Release all tensors."""
        self._measures.clear()

    def __repr__(self) -> str:
        return f"Reduced({' x '.join(map(str, self.shape))}, {', '.join(self.kept)})"


def peaks_of(name: str) -> str:
    """Return the name under which the largest weight of each cell of a map is kept: "peaks:64" for "pool:64"."""
    return f"peaks:{name.removeprefix('pool:')}"


def reduce(A: Weights, keep: Sequence[str], store: Store, what: str, real: RealTokens) -> Reduced:
    """Compute the measures and keep the results in the store; `what` names the layer in errors.

    Attention of padding queries, those that are not `real`, does not count in maps and in what keys receive, and
    distance counts from the real tokens. With each map the largest weight of each cell is kept.
    """
    values: dict[str, Tensor] = {}
    # Other measures are numbers of each query: they need not wait until a GPU has found the padding.
    is_counted = any(name == "received" or name.startswith("pool:") for name in keep)
    counted = A if not is_counted or real.are_all_queries else without_queries(A, real.queries)
    largest = f"pool:{MAX_MAP_CELLS}"
    in_one_pass = [name for name in keep if name in MEASURE_NAMES or (name == largest and counted is A)]
    measured: dict[str, Tensor] = {}
    if len(in_one_pass) > 1 and largest in in_one_pass:
        summary = A.summary_in(*_map_axes(A.shape, largest), peaks=True)
        names = {name: name for name in MEASURE_NAMES} | {largest: "map", peaks_of(largest): "peaks"}
        measured = {name: getattr(summary, field) for name, field in names.items()}
    elif len(in_one_pass) > 1:
        measured = A.measures()
    for name in keep:
        if name in measured and name in in_one_pass:
            values[name] = measured[name]
            if name == largest:
                values[peaks_of(name)] = measured[peaks_of(name)]
        elif name == "logit" and not A.call.normalize.has_scores:
            values[name] = torch.full(A.shape[:-1], torch.nan, dtype=A.dtype, device=A.device)
        elif name in MEASURE_NAMES:
            values[name] = getattr(A, name)()
        else:
            rows, cols = _map_axes(A.shape, name)
            values[name] = counted.pool(rows.count, cols.count)
            values[peaks_of(name)] = counted.pool(rows.count, cols.count, "max")
    if "received" in values and counted is not A:
        values["received"] = counted.received()
    if "distance" in values and (distance := distance_between(A, real)) is not None:
        values["distance"] = distance
    return Reduced(A.shape, _keep(values, store, what), real)


def _keep(values: Mapping[str, Tensor], store: Store, what: str) -> dict[str, KeptTensor]:
    """Keep results in the store; without copies if they fill most of their memory, which no other code writes to."""
    if not store.in_place or any(x.is_inference() for x in values.values()):
        return {name: store.put(x, f"{what}: {name}") for name, x in values.items()}
    memory = {(held := x.untyped_storage()).data_ptr(): held.nbytes() for x in values.values()}
    if sum(memory.values()) > MAX_HELD_SHARE * sum(x.nbytes for x in values.values()):
        return {name: store.put(x, f"{what}: {name}") for name, x in values.items()}
    for name, x in values.items():
        store.charge(x.nbytes, f"{what}: {name}", x)
    return {name: TensorInMemory(x) for name, x in values.items()}


def _map_axes(shape: torch.Size, name: str) -> tuple[Axis, Axis]:
    """Return the bins of `pool:N`: at most N, and no more than rows or columns."""
    rows, cols = (Axis.even(n, max(1, min(int(name.removeprefix("pool:")), n))) for n in shape[-2:])
    return rows, cols


def check_measures(keep: Sequence[str]) -> None:
    """Raise unless `keep` is a list of measures that capture can keep."""
    if isinstance(keep, str):
        raise TypeError(f"keep must be a list of measures, got the string {keep!r}; write keep=[{keep!r}]")
    for name in keep:
        number = name.removeprefix("pool:") if isinstance(name, str) else ""
        if name not in MEASURE_NAMES and not (number != name and number.isdecimal() and int(number)):
            raise ValueError(f"keep takes {', '.join(MEASURE_NAMES)} and pool:N, such as 'pool:512', got {name!r}")
    if not keep:
        raise ValueError("keep must name at least one measure; leave it out to keep queries and keys")
