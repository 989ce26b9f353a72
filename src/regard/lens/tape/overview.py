"""Overview: what is told of a layer before anybody looks closer, a few numbers and a small map for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...ops.blocks.pool_bins import Axis
from ...ops.weights import MAP, Summary, map_axes
from ..recording.reduced import ROWS, Reduced

THUMB = 48  # cells a side of the small map
SINK = 0.3  # of the mean query's attention: more makes a key a sink (Gu et al. 2025)


@dataclass(frozen=True, eq=False)
class Overview:
    """Means over the queries that see something, and the keys that draw most; NaN where a measure was not kept."""

    entropy: Tensor  # b h
    distance: Tensor  # b h
    max: Tensor  # b h
    sink: Tensor  # b h: the share of all attention that goes to sinks
    peak: Tensor  # b h: the largest share one key receives
    peak_key: Tensor  # b h
    thumbs: Tensor  # b h rows cols, at most 48 x 48

    @staticmethod
    def of(found: Summary | Reduced) -> Overview:
        """The overview of measures that were taken."""
        kept, shape, axes = _kept(found)
        device = next(iter(kept.values())).device if kept else None
        missing = torch.full(shape[:-2], torch.nan, device=device)
        seeing = kept["max"] != 0 if "max" in kept else missing.new_ones(shape[:-1], dtype=torch.bool)

        def mean(name: str) -> Tensor:
            if name not in kept:
                return missing
            return torch.where(seeing, kept[name].float(), 0.0).sum(-1) / seeing.sum(-1).clamp(min=1)

        sink, peak, peak_key = missing, missing, missing.isfinite().int()
        if "received" in kept and shape[-1]:
            share = kept["received"].float() / seeing.sum(-1, keepdim=True).clamp(min=1)
            sink = torch.where(share <= SINK, 0.0, share).sum(-1)
            peak, key = share.max(-1)
            peak_key = key.int()
        thumbs = missing.new_zeros(*shape[:-2], 0, 0)
        if "map" in kept and kept["map"].numel():
            thumbs = shrunk(kept["map"].float(), THUMB, axes)
        told = mean("entropy"), mean("distance"), mean("max"), sink, peak, peak_key, thumbs
        return Overview(*(x.cpu() for x in told))


def joined(heads: Sequence[Summary], shape: torch.Size) -> Summary:
    """The summary of a layer from those of its heads."""
    found: dict[str, Any] = {}
    for field in fields(Summary):
        values = [getattr(head, field.name) for head in heads]
        # Selected heads have their leading dims as one.
        whole = None if values[0] is None else torch.cat(values, 1)
        found[field.name] = None if whole is None else whole.unflatten(0, shape[:-3])
    return Summary(**found)


def shrunk(cells: Tensor, most: int, axes: Sequence[Axis] = ()) -> Tensor:
    """Means of neighbouring cells along the last two axes, so that at most so many are left on either.

    Without `axes` cells are all of one size.
    """
    if not cells.numel():
        return cells
    for dim, axis in zip((-2, -1), axes or [Axis.even(n, n) for n in cells.shape[-2:]], strict=True):
        if axis.count > most:
            wanted = torch.arange(most + 1) * (axis.n / most)
            cells = resampled(cells, dim, axis.edges().to(cells.device), wanted.to(cells.device))
    return cells


def resampled(cells: Tensor, dim: int, edges: Tensor, wanted: Tensor) -> Tensor:
    """Means between other edges of cells that are means between these; parts of a cell count as parts.

    >>> resampled(torch.tensor([1.0, 2.0, 6.0]), 0, torch.arange(4), torch.tensor([0.0, 1.5, 3.0]))
    tensor([1.3333, 4.6667])
    """
    if bool((missing := cells.isnan()).any()):  # which sums would carry on to all that follow
        holes = resampled(missing.double(), dim, edges, wanted) > 0
        return resampled(cells.nan_to_num(nan=0.0), dim, edges, wanted).masked_fill(holes, torch.nan)
    edges, wanted = edges.double(), wanted.double()
    total = torch.nn.functional.pad((cells.movedim(dim, -1).double() * edges.diff()).cumsum(-1), (1, 0))
    low = (torch.searchsorted(edges, wanted, right=True) - 1).clamp(0, len(edges) - 2)
    part = (wanted - edges[low]) / edges.diff()[low]
    at = total[..., low] + (total[..., low + 1] - total[..., low]) * part
    return (at.diff(dim=-1) / wanted.diff()).to(cells.dtype).movedim(-1, dim)


def _kept(found: Summary | Reduced) -> tuple[dict[str, Tensor], torch.Size, Sequence[Axis]]:
    """The measures, the shape of the matrix, and the bins of the map."""
    if isinstance(found, Summary):
        kept = {name: getattr(found, name) for name in (*ROWS, "map")}
        n_i, n_j = found.entropy.shape[-1], found.received.shape[-1]
        return kept, torch.Size((*found.entropy.shape, n_j)), map_axes(n_i, n_j)
    kept = {name: found[name] for name in ROWS if name in found.kept}
    if not found.maps:
        return kept, found.shape, ()
    best = min(found.maps, key=lambda name: abs(int(name.removeprefix("pool:")) - MAP))
    return kept | {"map": found[best]}, found.shape, found.axes(best)
