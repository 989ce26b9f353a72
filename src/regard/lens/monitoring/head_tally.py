"""HeadTally: the numbers of every head in one training step, over all its forward passes and all processes.

For each layer and head: the largest logit of any row, and means of the other measures in which every row counts the
same, whichever batch or process it is in. Rows are queries that are real tokens and see a key. Sums are float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..real_tokens import RealTokens
from ..recording.reduced import Reduced
from ..recording.sampled_weights import SparseWeights
from ..tape.overview import SINK_SHARE, counted_queries, largest_logit

MEANS = ("entropy", "max", "distance", "sink", "received")
MEASURES = ("logit", *MEANS)
KEPT_FOR = {"sink": "received"}  # measure -> the measure of `capture(keep=[...])` that it is computed from


class HeadTally:
    """Sums over rows, and maxima, for each layer."""

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> maxima 1 h, and sums of MEANS and rows, 6 h

    def add(self, layer: str, entry: Reduced | SparseWeights, real: RealTokens) -> None:
        """Add one call of a layer."""
        kept = entry.measures() if isinstance(entry, SparseWeights) else entry
        measures = {name: kept[name] for name in kept.kept}
        device = next(iter(measures.values())).device
        visible = counted_queries(measures, kept.shape, device, real.queries)  # b h i
        rows = visible.sum(-1).double()  # b h
        missing = torch.full_like(rows[0], torch.nan)
        logit = largest_logit(measures["logit"], visible).double().amax(0) if "logit" in measures else missing
        sums = [
            torch.where(visible, measures[name], 0.0).double().sum((0, 2)) if name in measures else missing
            for name in ("entropy", "max", "distance")
        ]
        if "received" in measures:
            share = measures["received"].double() / rows.clamp(min=1)[..., None]
            sinks = torch.where(share <= SINK_SHARE, 0.0, share).sum(-1)
            largest = share.amax(-1) if share.shape[-1] else torch.zeros_like(rows)
            sums += [(sinks * rows).sum(0), (largest * rows).sum(0)]
        else:
            sums += [missing, missing]
        self._put(layer, logit[None], torch.stack([*sums, rows.sum(0)]))

    def _put(self, layer: str, maxima: Tensor, sums: Tensor) -> None:
        if layer in self._numbers:
            before, total = self._numbers[layer]
            maxima, sums = torch.maximum(before, maxima), total + sums
        self._numbers[layer] = maxima, sums

    def reduce_over_processes(self, device: torch.device) -> None:
        """Join the tallies of all processes of the default group; does nothing in one process."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        own = {layer: sums.shape[1] for layer, (_, sums) in self._numbers.items()}
        layouts: list[Mapping[str, int]] = [own] * dist.get_world_size()
        dist.all_gather_object(layouts, own)
        heads = {layer: n for layout in layouts for layer, n in layout.items()}
        for layer, n in heads.items():
            if layer not in self._numbers:
                maxima = torch.full((1, n), -torch.inf, dtype=torch.float64, device=device)
                self._numbers[layer] = maxima, torch.zeros(len(MEANS) + 1, n, dtype=torch.float64, device=device)
        if not heads:
            return
        maxima = torch.cat([self._numbers[layer][0].to(device) for layer in heads], 1)
        sums = torch.cat([self._numbers[layer][1].to(device) for layer in heads], 1)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        parts = [x.split(list(heads.values()), 1) for x in (maxima, sums)]
        self._numbers = dict(zip(heads, zip(*parts, strict=True), strict=True))

    def values(self, measures: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
        """Return the numbers of each layer by measure, a tensor of heads each, float32 on the CPU."""
        if not self._numbers:
            return {}
        # One transfer from the GPU for all numbers.
        every = [torch.cat([maxima, sums[:-1] / sums[-1:].clamp(min=1)]) for maxima, sums in self._numbers.values()]
        device = every[0].device
        joined = torch.cat([x.to(device) for x in every], 1).float().cpu()
        parts = joined.split([x.shape[1] for x in every], 1)
        return {
            layer: {name: part[MEASURES.index(name)].clone() for name in measures}
            for layer, part in zip(self._numbers, parts, strict=True)
        }
