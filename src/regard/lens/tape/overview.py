"""Per-head summary numbers: the thumbnails and means of the viewer's overview, and the rows of `tape.table()`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.blocks.pool_bins import Axis
from ...ops.blocks.resample import shrink
from ...ops.weights import MAX_MAP_CELLS, Summary, Weights, map_axes
from ..layer_names import shown_name
from ..real_tokens import RealTokens, distance_between
from ..recording.recorder import Key
from ..recording.reduced import MEASURE_NAMES, Reduced
from ..recording.sampled_weights import SparseWeights
from .measure_table import MeasureTable
from .stacked_layers import Layer, stack, stacks

THUMBNAIL_CELLS = 48  # cells per side of a thumbnail
MAX_MAP_ENTRIES = 2**23  # the largest map of a layer: 512 x 512 for one text and 32 heads
BATCH_CELL = 8  # queries, and keys, of a cell of a layer with more texts and heads, at least
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
        visible = counted_queries(measures, shape, device, queries)

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


def summary_over(A: Weights, real: RealTokens, *, peaks: bool = False, layers: int = 1) -> Summary:
    """Return the summary of a layer in which keys and cells of the map receive nothing from padding.

    Queries of padding count as rows that see no key, and distances ignore padding. With `peaks` the summary holds the
    largest weight of each cell. The map of a layer with many texts and heads has larger cells than `A.summary()`;
    `layers` is the number of layers that are stacked in A.
    """
    rows, cols = map_axes(*A.shape[-2:])
    maps = A.shape[:-2].numel() // layers
    if maps * rows.count * cols.count > MAX_MAP_ENTRIES:
        side = max(1, math.isqrt(MAX_MAP_ENTRIES // maps))
        rows, cols = (Axis.cells(axis.n, min(side, -(-axis.n // BATCH_CELL))) for axis in (rows, cols))
    summary = A.summary_in(rows, cols, peaks=peaks, queries=real.counted)
    distance = distance_between(A, real)
    return summary if distance is None else replace(summary, distance=distance)


def measures_over(A: Weights, real: RealTokens) -> dict[str, Tensor]:
    """Return the measures of such a summary by name, without its map."""
    measures, distance = A.measures(queries=real.counted), distance_between(A, real)
    return measures if distance is None else measures | {"distance": distance}


def table(entries: Iterable[tuple[Key, Weights | Reduced | SparseWeights, RealTokens]]) -> Any:
    """One row for each layer, call, batch row and head; a pandas data frame if pandas is installed."""
    means = [(key, shape, measured) for key, shape, measured in _means_of_layers(entries) if measured]
    counts = [b * h for _, (b, h), _ in means]
    columns: dict[str, np.ndarray[Any, Any]] = {
        "layer": np.repeat(np.array([shown_name(layer) for (layer, _), _, _ in means], dtype=object), counts),
        "call": np.repeat(np.array([call for (_, call), _, _ in means], dtype=np.int64), counts),
        "batch": np.concatenate([np.repeat(np.arange(b), h) for _, (b, h), _ in means] or [np.arange(0)]),
        "head": np.concatenate([np.tile(np.arange(h), b) for _, (b, h), _ in means] or [np.arange(0)]),
    }
    for name in dict.fromkeys(name for _, _, measured in means for name in measured):
        missing = torch.tensor(math.nan, dtype=torch.float64)
        parts = [measured.get(name, missing.expand(shape)).flatten() for _, shape, measured in means]
        columns[name] = torch.cat(_on_one_device(parts)).cpu().numpy()
    return _as_table(columns if means else {})


def _on_one_device(parts: list[Tensor]) -> list[Tensor]:
    return parts if len({x.device for x in parts}) == 1 else [x.cpu() for x in parts]


def as_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a pandas data frame if pandas is installed, else a dict of columns; a value that a row lacks is NaN."""
    names = dict.fromkeys(name for row in rows for name in row)
    return _as_table({name: [row.get(name, math.nan) for row in rows] for name in names})


def _means_of_layers(
    entries: Iterable[tuple[Key, Weights | Reduced | SparseWeights, RealTokens]],
) -> list[tuple[Key, torch.Size, dict[str, Tensor]]]:
    """Return each layer in order, its `b h`, and its means `b h`."""
    found: dict[Key, tuple[torch.Size, dict[str, Tensor]]] = {}

    def layers() -> Iterator[Layer]:
        for key, A, real in entries:
            found[key] = A.shape[:2], {}
            if isinstance(A, Weights):
                yield Layer(key, A, real)
            else:
                found[key][1].update(_head_means(A, real))

    for stacked in stacks(layers()):
        measured = _head_means(*stack(stacked))
        for name, means in measured.items():
            for layer, part in zip(stacked, means.chunk(len(stacked)), strict=True):
                found[layer.key][1][name] = part
    return [(key, shape, means) for key, (shape, means) in found.items()]


def _as_table(columns: Mapping[str, Any]) -> Any:
    if _has_pandas():
        return import_module("pandas").DataFrame(columns)
    return MeasureTable({name: list(x) if isinstance(x, list) else x.tolist() for name, x in columns.items()})


@cache
def _has_pandas() -> bool:
    """True if pandas is installed: to look for it takes as long as a small table."""
    return find_spec("pandas") is not None


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
        measures = {name: x for name in (*MEASURE_NAMES, "map") if (x := getattr(measured, name)) is not None}
        return measures, torch.Size((*measured.entropy.shape, measured.received.shape[-1])), measured.axes
    measures = {name: measured[name] for name in MEASURE_NAMES if name in measured.kept}
    if not measured.maps:
        return measures, measured.shape, ()
    nearest = min(measured.maps, key=lambda name: abs(int(name.removeprefix("pool:")) - MAX_MAP_CELLS))
    return measures | {"map": measured[nearest]}, measured.shape, measured.axes(nearest)


def _head_means(A: Weights | Reduced | SparseWeights, real: RealTokens) -> dict[str, Tensor]:
    """Return the `b h` mean of each measure, in float64; of `received` the largest share of one key, of `logit` the
    largest.
    """
    if isinstance(A, Weights):
        measures, shape = measures_over(A, real), A.shape
    else:
        measures, shape, _ = _measures_of(A)
    measures = {name: measures[name].double() for name in MEASURE_NAMES if name in measures}
    device = next(iter(measures.values())).device if measures else None
    visible = counted_queries(measures, shape, device, real.queries)
    averaged = (name for name in measures if name not in ("received", "logit"))
    means = {name: _mean_over_queries(measures[name], visible) for name in averaged}
    if "logit" in measures:
        means["logit"] = largest_logit(measures["logit"], visible)
    if "received" in measures:
        received = measures["received"]
        largest = received.amax(-1) if shape[-1] else received.sum(-1)  # amax of no keys raises, their sum is 0
        means["received"] = largest / visible.sum(-1).clamp(min=1)
    return {name: means[name] for name in measures}


def counted_queries(
    measures: Mapping[str, Tensor], shape: torch.Size, device: torch.device | None, queries: Tensor | None
) -> Tensor:
    """Return `b h i`: whether a query is real and sees any key; unknown unless `max` or `logit` was kept."""
    if "max" in measures:
        sees = measures["max"] != 0
    elif "logit" in measures:
        sees = measures["logit"] != -math.inf
    else:
        sees = torch.ones(shape[:-1], dtype=torch.bool, device=device)
    return sees if queries is None else sees & queries.to(sees.device).view(*shape[:-3], 1, shape[-2])


def largest_logit(logits: Tensor, visible: Tensor) -> Tensor:
    """Return the largest of `b h i` among the queries that count: `b h`; -inf if there is none."""
    found = torch.where(visible, logits, -math.inf)
    return found.amax(-1) if found.shape[-1] else found.new_full(found.shape[:-1], -math.inf)


def _mean_over_queries(x: Tensor, visible: Tensor) -> Tensor:
    """Average `b h i` over the queries that see a key; 0 if there is none."""
    return torch.where(visible, x, 0.0).sum(-1) / visible.sum(-1).clamp(min=1)
