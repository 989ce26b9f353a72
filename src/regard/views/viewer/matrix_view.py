"""Matrix views: a head, an aggregate over heads or a difference; any rectangle is computed exactly on demand.

A rectangle needs only its rows of q, its columns of k and the row statistic (for a softmax, the log-sum-exp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...ops.blocks.pool_bins import Axis
from ...ops.blocks.tile_weights import PlannedBlock, tile_weights
from ...ops.terms.coordinates import Block
from ...ops.terms.mask_tiles import Grid
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.scores import Additive, Location, Score, select_heads
from ...ops.weights import Summary, Weights

CELLS = 128  # width of the mask tiles: fully hidden ones are skipped, fully visible ones need no mask


class MatrixView(Protocol):
    """A matrix of queries by keys."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def device(self) -> torch.device:
        """The device that computes its entries."""
        ...

    @property
    def signed(self) -> bool:
        """Whether entries may be negative."""
        ...

    def block(self, rows: slice | Tensor, cols: slice) -> Tensor:
        """Compute the entries of a rectangle."""
        ...

    def visible_tiles(self, rows: slice, cols: slice, size: int = CELLS) -> Tensor:
        """Return a flag per tile of `size` x `size` entries, on the host: False if the mask hides all of the tile."""
        ...

    def work(self, rows: slice | Tensor, cols: slice) -> int:
        """Return how many weights `block` would compute, those for missing row statistics included."""
        ...

    def empty_rows(self, rows: slice) -> Tensor:
        """Return True, on the host, for each row of a softmax that sees no key."""
        ...

    def stored_map(self) -> StoredMap | None:
        """Return the stored map of the whole matrix, or None."""
        ...


class StoredMap(NamedTuple):
    """A map of the whole matrix, its bins, and whether its values are exactly the means of the bins.

    `peaks` holds the largest entry of each bin, None if it is not known.
    """

    map: Tensor
    axes: tuple[Axis, Axis]
    exact: bool
    peaks: Tensor | None = None


def runs(seen: Tensor, first: int, stop: int, size: int = CELLS) -> list[slice]:
    """Return the slices from first to stop whose flags are set, one flag per `size` entries; neighbours are merged.

    >>> runs(torch.tensor([True, True, False, True]), 10, 17, size=2)
    [slice(10, 14, None), slice(16, 17, None)]
    """
    edges = torch.nn.functional.pad(seen.int(), (1, 1)).diff()
    pairs = zip((edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist(), strict=True)
    return [slice(first + a * size, min(first + b * size, stop)) for a, b in pairs]


def aggregate_maps(stored: StoredMap, how: Literal["mean", "max"]) -> StoredMap:
    """Aggregate stored maps `h rows cols` over heads.

    For "max" the map is inexact: the largest mean is not the mean of the largest. For "mean" the peaks are not known.
    """
    if how == "mean":
        return stored._replace(map=stored.map.mean(0), peaks=None)
    peaks = None if stored.peaks is None else stored.peaks.amax(0)
    return stored._replace(map=stored.map.amax(0), exact=False, peaks=peaks)


def map_of_summary(summary: Summary, batch: int, heads: int | list[int]) -> StoredMap:
    """Return the stored map of some heads of a summary."""
    peaks = None if summary.peaks is None else summary.peaks[batch, heads].float().cpu()
    return StoredMap(summary.map[batch, heads].float().cpu(), summary.axes, True, peaks)


class HeadView:
    """The weights of one head of one batch row; `fetch(rows, cols)` is called before q and k are read there."""

    signed = False

    def __init__(
        self,
        A: Weights,
        batch: int,
        head: int,
        stored: StoredMap | None = None,
        fetch: Callable[[slice | Tensor, slice], None] | None = None,
    ) -> None:
        self._call, self._batch, self._head, self._stored, self._fetch = A.call, batch, head, stored, fetch
        self._whole = replace(A.call.whole(), batch=slice(batch, batch + 1), heads=slice(head, head + 1))
        self._outline = _outline(self._whole, A.call.mask)
        self._number = self._whole.h.flatten()  # the original number of the head
        self._statistic = None if A.known_statistic is None else A.known_statistic[batch, head]  # i 1
        self._known: Tensor | None = None  # rows whose statistic has been computed, None if it was captured
        if A.known_statistic is None and self._needs_statistic():
            self._known = torch.zeros(self.shape[0], dtype=torch.bool)

    @property
    def shape(self) -> tuple[int, int]:
        return self._call.shape[2:]

    @property
    def device(self) -> torch.device:
        return self._call.q.device

    def work(self, rows: slice | Tensor, cols: slice) -> int:
        ids = torch.arange(self.shape[0])[rows]
        unknown = 0 if self._known is None else int((~self._known[ids]).sum())
        return len(ids) * (cols.stop - cols.start) + unknown * self.shape[1]

    @torch.no_grad()
    def empty_rows(self, rows: slice) -> Tensor:
        statistic = self._statistic_of(rows)
        assert statistic is not None
        return (statistic == -torch.inf).flatten().cpu()

    def stored_map(self) -> StoredMap | None:
        return self._stored

    @torch.no_grad()
    def block(self, rows: slice | Tensor, cols: slice) -> Tensor:
        parts = self._visible_slices(_part(self._outline, rows, cols))
        if parts and self._fetch is not None:
            self._fetch(rows, slice(parts[0][0].start, parts[-1][0].stop))
        place = _part(self._whole, rows, cols)
        if isinstance(rows, Tensor):
            place = replace(place, q=self._call.q[:, :, place.row_ids])
        statistic = self._statistic_of(rows) if parts else None
        if parts == [(cols, False)]:
            return self._weigh(place, statistic, masked=False)
        out = torch.zeros(len(place.row), cols.stop - cols.start, dtype=place.dtype, device=place.device)
        for part, masked in parts:
            at = slice(part.start - cols.start, part.stop - cols.start)
            out[:, at] = self._weigh(replace(place, cols=part), statistic, masked)
        return out

    def visible_tiles(self, rows: slice, cols: slice, size: int = CELLS) -> Tensor:
        high, wide = (-(-(x.stop - x.start) // size) for x in (rows, cols))
        if self._call.mask is None:
            return torch.ones(high, wide, dtype=torch.bool)
        some, _ = self._call.mask.tiles(Grid(_part(self._outline, rows, cols), size, size))
        return some.expand(1, 1, high, wide)[0, 0].cpu()

    def _needs_statistic(self) -> bool:
        empty = _part(self._whole, slice(0, 0), slice(0, 0))
        nothing = torch.empty(1, 1, 0, 0, dtype=empty.dtype, device=empty.device)
        return self._call.normalize.statistic(nothing, empty) is not None

    def _statistic_of(self, rows: slice | Tensor) -> Tensor | None:
        """Return the statistic of the rows, `rows 1`, computed if missing; None if the normalizer needs none."""
        if self._known is not None:
            ids = torch.arange(self.shape[0])[rows]
            missing = ids[~self._known[ids]]
            if len(missing):
                if self._fetch is not None:
                    self._fetch(missing, slice(0, self.shape[1]))
                one = slice(self._batch, self._batch + 1), slice(self._head, self._head + 1)
                found = Weights(self._call.select(*one, missing.to(self._call.q.device))).statistic
                assert found is not None
                if self._statistic is None:
                    self._statistic = found.new_zeros(self.shape[0], 1)
                self._statistic[missing] = found[0, 0, :, None]
                self._known[missing] = True
        return None if self._statistic is None else self._statistic[rows]

    def _visible_slices(self, place: Block) -> list[tuple[slice, bool]]:
        """Return the slices of keys that some row of a rectangle may see, each with True if it needs the mask."""
        assert isinstance(place.cols, slice)
        first, stop = place.cols.start, place.cols.stop
        if self._call.mask is None:
            return [(place.cols, False)]
        n = -(-(stop - first) // CELLS)
        tiles = self._call.mask.tiles(Grid(place, max(1, len(place.row)), CELLS))
        some, full = (x.expand(1, 1, 1, n).flatten().tolist() for x in tiles)
        parts: list[tuple[slice, bool]] = []
        for m in (m for m in range(n) if some[m]):
            cols = slice(first + m * CELLS, min(first + (m + 1) * CELLS, stop))
            if parts and parts[-1][0].stop == cols.start and parts[-1][1] != full[m]:
                parts[-1] = slice(parts[-1][0].start, cols.stop), parts[-1][1]
            else:
                parts.append((cols, not full[m]))
        return parts

    def _weigh(self, place: Block, statistic: Tensor | None, masked: bool) -> Tensor:
        call = self._call
        q = place.q[place.batch, place.heads, place.rows].to(call.dtype)
        k = call.k[place.batch, place.head_slice(call.k.shape[1]), place.cols].to(call.dtype)
        score = _score_of(call.score, place)
        q, k = score.prepare(q, k, self._number)
        if isinstance(score, Additive):
            score = Additive(select_heads(score.u, 2, self._number))
        planned = PlannedBlock(place, slice(0, q.shape[-2]) if masked else None)
        known = None if statistic is None else statistic[None, None]
        return tile_weights(replace(call, score=score), planned, q, k, known, finite=False)[0, 0]


@dataclass(frozen=True)
class ValueWeighted:
    """The norm abs(A_ij) |v_j W_h| of what key j adds to the output of query i; `norms`, `j`, are the |v_j W_h|."""

    weights: MatrixView
    norms: Tensor

    signed = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weights.shape

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def work(self, rows: slice | Tensor, cols: slice) -> int:
        return self.weights.work(rows, cols)

    def empty_rows(self, rows: slice) -> Tensor:
        return self.weights.empty_rows(rows)

    def visible_tiles(self, rows: slice, cols: slice, size: int = CELLS) -> Tensor:
        return self.weights.visible_tiles(rows, cols, size)

    def block(self, rows: slice | Tensor, cols: slice) -> Tensor:
        A = self.weights.block(rows, cols)
        return A.abs() * self.norms[cols].to(A)

    def stored_map(self) -> StoredMap | None:
        """None: the mean of products is not the product of means."""
        return None


@dataclass(frozen=True)
class HeadsAggregate:
    """The mean or the maximum of each entry over the heads of a layer."""

    heads: list[MatrixView]
    how: Literal["mean", "max"]

    signed = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads[0].shape

    @property
    def device(self) -> torch.device:
        return self.heads[0].device

    def work(self, rows: slice | Tensor, cols: slice) -> int:
        return sum(head.work(rows, cols) for head in self.heads)

    def empty_rows(self, rows: slice) -> Tensor:
        return torch.stack([head.empty_rows(rows) for head in self.heads]).all(0)

    def visible_tiles(self, rows: slice, cols: slice, size: int = CELLS) -> Tensor:
        return torch.stack([head.visible_tiles(rows, cols, size) for head in self.heads]).any(0)

    def block(self, rows: slice | Tensor, cols: slice) -> Tensor:
        total = self.heads[0].block(rows, cols)
        for head in self.heads[1:]:
            part = head.block(rows, cols)
            total = total.add_(part) if self.how == "mean" else torch.maximum(total, part)
        return total.div_(len(self.heads)) if self.how == "mean" else total

    def stored_map(self) -> StoredMap | None:
        found = [stored for head in self.heads if (stored := head.stored_map()) is not None]
        if len(found) < len(self.heads):
            return None
        peaks = [stored.peaks for stored in found if stored.peaks is not None]
        every = torch.stack(peaks) if len(peaks) == len(found) else None
        return aggregate_maps(StoredMap(torch.stack([x.map for x in found]), found[0].axes, True, every), self.how)


@dataclass(frozen=True)
class Difference:
    """One matrix minus another."""

    left: MatrixView
    right: MatrixView

    signed = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape

    @property
    def device(self) -> torch.device:
        return self.left.device

    def work(self, rows: slice | Tensor, cols: slice) -> int:
        return self.left.work(rows, cols) + self.right.work(rows, cols)

    def empty_rows(self, rows: slice) -> Tensor:
        return self.left.empty_rows(rows) | self.right.empty_rows(rows)

    def visible_tiles(self, rows: slice, cols: slice, size: int = CELLS) -> Tensor:
        return self.left.visible_tiles(rows, cols, size) | self.right.visible_tiles(rows, cols, size)

    def block(self, rows: slice | Tensor, cols: slice) -> Tensor:
        return self.left.block(rows, cols) - self.right.block(rows, cols).to(self.device)

    def stored_map(self) -> StoredMap | None:
        left, right = self.left.stored_map(), self.right.stored_map()
        if left is None or right is None or left.axes != right.axes:
            return None
        return StoredMap(left.map - right.map, left.axes, left.exact and right.exact)


def _score_of(score: Score, place: Block) -> Score:
    """Return the score for the keys of a rectangle; only `Location` depends on their positions."""
    return Location(score.w[..., place.cols, :]) if isinstance(score, Location) else score


def _outline(whole: Block, mask: Mask | None) -> Block:
    """Return the block with coordinates on the host if the mask allows, so that its tiles need no device sync."""
    if mask is None or mask.tensors():
        return whole
    batch_ids, head_ids = (None if x is None else x.cpu() for x in (whole.batch_ids, whole.head_ids))
    return replace(whole, device=torch.device("cpu"), batch_ids=batch_ids, head_ids=head_ids)


def _part(whole: Block, rows: slice | Tensor, cols: slice) -> Block:
    """Return the coordinates of a rectangle."""
    if isinstance(rows, slice):
        return replace(whole, rows=rows, cols=cols)
    return replace(whole, rows=slice(0, len(rows)), cols=cols, row_ids=rows.to(whole.device))
