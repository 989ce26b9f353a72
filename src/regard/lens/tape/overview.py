"""Per-head summary numbers: the thumbnails and means of the viewer's overview, and the rows of `tape.table()`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...ops.blocks.pool_bins import Axis
from ...ops.blocks.resample import shrink
from ...ops.weights import MAX_MAP_CELLS, Summary, Weights, map_axes
from ..layer_names import shown_name
from ..real_tokens import RealTokens, distance_between, without_queries
from ..recording.recorder import Key
from ..recording.reduced import MEASURE_NAMES, Reduced
from ..recording.sampled_weights import SparseWeights
from .measure_table import MeasureTable

THUMBNAIL_CELLS = 48  # cells per side of a thumbnail
SINK_SHARE = 0.3  # a key is a sink if it receives more than this share of the mean query's attention (Gu et al. 2025)


@dataclass(frozen=True, eq=False)
class Overview:
    """Numbers for each head: means over the real queries that see a key, and the key that receives most from them.

    A value is NaN if its measure was not kept.
    """

    entropy: Tensor  # b h
    distance: Tensor  # b h
    max: Tensor  # b h
    sink: Tensor  # b h: share of all attention that sinks receive
    peak: Tensor  # b h: largest share that one key receives
    peak_key: Tensor  # b h
    thumbs: Tensor  # b h rows cols, at most 48 x 48

    @staticmethod
    def of(measured: Summary | Reduced | SparseWeights, queries: Tensor | None = None) -> Overview:
        """Build the overview of a summary, of the measures that `capture(keep=[...])` kept, or of edges.

        `queries`, `b i`, is True for those that are real tokens, all if None: the others do not count.
        """
        measures, shape, axes = _measures_of(measured)
        device = next(iter(measures.values())).device if measures else None
        missing = torch.full(shape[:-2], torch.nan, device=device)
        visible = _counted_queries(measures, shape, device, queries)

        def mean(name: str) -> Tensor:
            return _mean_over_queries(measures[name].float(), visible) if name in measures else missing

        sink, peak, peak_key = missing, missing, missing.isfinite().int()
        if "received" in measures and shape[-1]:
            share = measures["received"].float() / visible.sum(-1, keepdim=True).clamp(min=1)
            sink = torch.where(share <= SINK_SHARE, 0.0, share).sum(-1)
            peak, key = share.max(-1)
            peak_key = key.int()
        thumbs = missing.new_zeros(*shape[:-2], 0, 0)
        if "map" in measures and measures["map"].numel():
            thumbs = shrink(measures["map"].float(), THUMBNAIL_CELLS, axes)
        values = mean("entropy"), mean("distance"), mean("max"), sink, peak, peak_key, thumbs
        return Overview(*(x.cpu() for x in values))


def summary_over(A: Weights, real: RealTokens, *, peaks: bool = False) -> Summary:
    """Return the summary of a layer in which keys and cells of the map receive nothing from padding.

    Distances ignore it. With `peaks` the summary holds the largest weight of each cell.
    """
    summary = A.summary(peaks=peaks)
    padding = ~real.queries.to(A.device).view(*A.shape[:-3], 1, A.shape[-2])
    if bool((padding & (summary.max != 0)).any()):
        without = without_queries(A, ~padding.squeeze(-2)).summary(peaks=peaks)
        summary = replace(summary, received=without.received, map=without.map, peaks=without.peaks)
    if (distance := distance_between(A, real)) is not None:
        summary = replace(summary, distance=distance)
    return summary


def table(entries: Iterable[tuple[Key, Weights | Reduced | SparseWeights, RealTokens]]) -> Any:
    """One row for each layer, call, batch row and head; a pandas data frame if pandas is installed."""
    rows: list[dict[str, Any]] = []
    for (layer, call), A, real in entries:
        measures = {name: x.tolist() for name, x in _head_means(A, real).items()}
        b, h = A.shape[:2]
        for batch, head in ((batch, head) for batch in range(b) for head in range(h) if measures):
            numbers = {name: x[batch][head] for name, x in measures.items()}
            rows.append({"layer": shown_name(layer), "call": call, "batch": batch, "head": head, **numbers})
    return as_table(rows)


def as_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a pandas data frame if pandas is installed, else a dict of columns; a value that a row lacks is NaN."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    return MeasureTable(columns) if find_spec("pandas") is None else import_module("pandas").DataFrame(columns)


def concatenate_heads(parts: Sequence[Summary], shape: torch.Size) -> Summary:
    """Join summaries of consecutive heads into the summary of a layer of this shape."""
    joined: dict[str, Any] = {}
    for field in fields(Summary):
        values = [getattr(part, field.name) for part in parts]
        # Selecting heads flattens the leading dims to one: (batch) h ... -> *batch h ...
        whole = None if values[0] is None else torch.cat(values, 1)
        joined[field.name] = None if whole is None else whole.unflatten(0, shape[:-3])
    return Summary(**joined)


def summary_of_heads(summary: Summary, heads: Sequence[int]) -> Summary:
    """Return the part of a summary, `b h ...`, that some heads have."""
    parts: dict[str, Any] = {}
    for field in fields(Summary):
        whole = getattr(summary, field.name)
        parts[field.name] = None if whole is None else whole[:, list(heads)]
    return Summary(**parts)


def _measures_of(measured: Summary | Reduced | SparseWeights) -> tuple[dict[str, Tensor], torch.Size, Sequence[Axis]]:
    """Return the measures by name, the shape of the matrix, and the bins of the map."""
    if isinstance(measured, SparseWeights):
        measured = measured.measures()
    if isinstance(measured, Summary):
        measures = {name: getattr(measured, name) for name in (*MEASURE_NAMES, "map")}
        n_i, n_j = measured.entropy.shape[-1], measured.received.shape[-1]
        return measures, torch.Size((*measured.entropy.shape, n_j)), map_axes(n_i, n_j)
    measures = {name: measured[name] for name in MEASURE_NAMES if name in measured.kept}
    if not measured.maps:
        return measures, measured.shape, ()
    nearest = min(measured.maps, key=lambda name: abs(int(name.removeprefix("pool:")) - MAX_MAP_CELLS))
    return measures | {"map": measured[nearest]}, measured.shape, measured.axes(nearest)


def _head_means(A: Weights | Reduced | SparseWeights, real: RealTokens) -> dict[str, Tensor]:
    """Return the `b h` mean of each measure, in float64 on the CPU; for `received` the largest share of one key."""
    measures, shape, _ = _measures_of(summary_over(A, real) if isinstance(A, Weights) else A)
    measures = {name: measures[name].double().cpu() for name in MEASURE_NAMES if name in measures}
    visible = _counted_queries(measures, shape, None, real.queries)
    means = {name: _mean_over_queries(x, visible) for name, x in measures.items() if name != "received"}
    if "received" in measures:
        received = measures["received"]
        largest = received.amax(-1) if shape[-1] else received.sum(-1)  # amax of no keys raises, their sum is 0
        means["received"] = largest / visible.sum(-1).clamp(min=1)
    return {name: means[name] for name in measures}


def _counted_queries(
    measures: Mapping[str, Tensor], shape: torch.Size, device: torch.device | None, queries: Tensor | None
) -> Tensor:
    """Return `b h i`: whether a query is real and sees any key; the latter is unknown if `max` was not kept."""
    sees = measures["max"] != 0 if "max" in measures else torch.ones(shape[:-1], dtype=torch.bool, device=device)
    return sees if queries is None else sees & queries.to(sees.device).view(*shape[:-3], 1, shape[-2])


def _mean_over_queries(x: Tensor, visible: Tensor) -> Tensor:
    """Average `b h i` over the queries that see a key; 0 if there is none."""
    return torch.where(visible, x, 0.0).sum(-1) / visible.sum(-1).clamp(min=1)
