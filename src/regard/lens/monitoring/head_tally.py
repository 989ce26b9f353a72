"""HeadTally: the numbers of every head in one training step, over all its forward passes and all processes.

For each layer and head: the largest logit of any row, and means of the other measures in which every row counts the
same, whichever batch or process it is in. Rows are queries that are real tokens and see a key. Sums are float64.

Calls of one size are tallied together, in some thirty operators for all layers. A GPU copies their
numbers while it goes on, so the end of a step waits for the forward pass but not for later launches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.call import no_autocast
from ..recording.reduced import Reduced
from ..recording.sampled_weights import SparseWeights
from ..tape.overview import SINK_SHARE, counted_queries, largest_logit

MEANS = ("entropy", "max", "distance", "sink", "received")
MEASURES = ("logit", *MEANS)
KEPT_FOR = {"sink": "received"}  # measure -> the measure of `capture(keep=[...])` that it is computed from
MAX_ENTRIES = 2**24  # numbers of one measure that are tallied together

Entry = Reduced | SparseWeights


class HeadTally:
    """The numbers of each call: the largest logits, sums of MEANS over rows, and the number of rows."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, Entry]] = []
        self._numbers: dict[int, tuple[Entry, _Numbers, int]] = {}  # id of a call -> the call, and its place in numbers
        self._layers: dict[str, Tensor] | None = None  # layer -> numbers of all its calls, 7 h

    @torch.no_grad()
    def add(self, calls: Sequence[tuple[str, Entry]]) -> None:
        """Take in all calls of the step so far, each with its layer; those added before are not computed again."""
        self._calls, self._layers = list(calls), None
        groups: dict[Hashable, list[tuple[Entry, Reduced]]] = {}
        for _, entry in calls:
            if id(entry) in self._numbers:
                continue
            kept = entry.measures() if isinstance(entry, SparseWeights) else entry
            first, queries = kept[kept.kept[0]], entry.real.counted
            alike = tuple(kept.shape), kept.kept, first.dtype, first.device, None if queries is None else id(queries)
            groups.setdefault(alike, []).append((entry, kept))
        for group in groups.values():
            size = max(1, MAX_ENTRIES // max(1, group[0][1].shape[:-1].numel()))
            for start in range(0, len(group), size):
                self._add_alike(group[start : start + size])

    def _add_alike(self, calls: Sequence[tuple[Entry, Reduced]]) -> None:
        """Compute the numbers of calls of one size with the same real queries, and release their measures."""
        queries, (_, kept) = calls[0][0].real.counted, calls[0]
        with no_autocast(kept[kept.kept[0]].device):
            numbers = _Numbers(_numbers([each for _, each in calls], queries))
        for at, (entry, each) in enumerate(calls):
            self._numbers[id(entry)] = entry, numbers, at
            each.release()

    def _numbers_by_layer(self) -> dict[str, Tensor]:
        """Return the numbers of each layer over all its calls, on the CPU: 7 h."""
        if self._layers is None:
            self._layers = {}
            for layer, entry in self._calls:
                _, numbers, at = self._numbers[id(entry)]
                found, before = numbers.on_cpu[at], self._layers.get(layer)
                self._layers[layer] = found if before is None else _join(before, found)
        return self._layers

    def reduce_over_processes(self, device: torch.device) -> None:
        """Join the tallies of all processes of the default group; does nothing in one process."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        joined = self._numbers_by_layer()
        own = {layer: x.shape[1] for layer, x in joined.items()}
        layouts: list[Mapping[str, int]] = [own] * dist.get_world_size()
        dist.all_gather_object(layouts, own)
        heads = {layer: n for layout in layouts for layer, n in layout.items()}
        if not heads:
            return
        empty = {layer: torch.zeros(1 + len(MEASURES), n, dtype=torch.float64) for layer, n in heads.items()}
        for x in empty.values():
            x[0] = -torch.inf
        whole = torch.cat([joined.get(layer, empty[layer]) for layer in heads], 1).to(device)
        maxima, sums = whole[:1].contiguous(), whole[1:].contiguous()
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        parts = torch.cat([maxima, sums]).cpu().split(list(heads.values()), 1)
        self._layers = dict(zip(heads, parts, strict=True))

    def values(self, measures: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
        """Return the numbers of each layer by measure, a tensor of heads each, float32 on the CPU."""
        if not (joined := self._numbers_by_layer()):
            return {}
        whole = torch.cat([*joined.values()], 1)
        whole = torch.cat([whole[:1], whole[1:-1] / whole[-1:].clamp(min=1)]).float()
        chosen = whole[[MEASURES.index(name) for name in measures]]
        parts = chosen.split([x.shape[1] for x in joined.values()], 1)
        return {
            layer: dict(zip(measures, part.clone().unbind(), strict=True))
            for layer, part in zip(joined, parts, strict=True)
        }


class _Numbers:
    """Numbers of calls of one size, `n 7 h`, on their way to the CPU."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._copied = numbers, None
        if numbers.is_cuda:
            self._numbers = numbers.to("cpu", non_blocking=True)
            self._copied = torch.cuda.current_stream(numbers.device).record_event()

    @property
    def on_cpu(self) -> Tensor:
        """The numbers; waits until they are copied."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._numbers = self._numbers.cpu()
        return self._numbers


def _numbers(calls: Sequence[Reduced], queries: Tensor | None) -> Tensor:
    """Return maxima, sums of MEANS and rows of calls of one size, `n 7 h`."""
    kept, n = calls[0].kept, len(calls)
    measures = {name: torch.stack([call[name] for call in calls]) for name in kept}  # n b h i, or n b h j
    visible = counted_queries(measures, calls[0].shape, measures[kept[0]].device, queries)
    rows = visible.sum(-1).double().expand(n, -1, -1)  # n b h
    missing = rows.new_full((n, rows.shape[2]), torch.nan)
    found = [largest_logit(measures["logit"], visible).double().amax(1) if "logit" in measures else missing]
    found += [
        torch.where(visible, measures[name], 0.0).sum((1, 3), dtype=torch.float64) if name in measures else missing
        for name in ("entropy", "max", "distance")
    ]
    if "received" in measures:
        share = measures["received"].double() / rows.clamp(min=1)[..., None]
        sinks = torch.where(share <= SINK_SHARE, 0.0, share).sum(-1)
        largest = share.amax(-1) if share.shape[-1] else torch.zeros_like(rows)
        found += [(sinks * rows).sum(1), (largest * rows).sum(1)]
    else:
        found += [missing, missing]
    return torch.stack([*found, rows.sum(1)], 1)


def _join(one: Tensor, other: Tensor) -> Tensor:
    """Return the numbers of two parts of a batch, `7 h` each, as those of the whole."""
    return torch.cat([torch.maximum(one[:1], other[:1]), one[1:] + other[1:]])
