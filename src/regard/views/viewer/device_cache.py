"""Device cache: the heads that a viewer looks at, on the device that computes their tiles.

Without a device, or if a capture is on it already, heads stay where they are. Otherwise the rows of q, k and the row
statistic that a tile needs are copied from the capture on first use. When the cache is full, the least recently used
heads are evicted, together with the terms that only they use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...lens.recording.generation import to_device
from ...ops.call import SLOTS
from ...ops.terms.term import Term
from ...ops.weights import Weights
from .matrix_view import HeadView, StoredMap

MAX_BYTES = 2 * 2**30  # heads and terms on a device together
ROWS_PER_COPY = 4096


class CachedHead(NamedTuple):
    """A head, the bytes it takes on the device, and its terms there."""

    head: HeadView
    size: int = 0
    terms: tuple[Term, ...] = ()


class DeviceCache:
    """Heads by name; `device` is where they are computed, None to compute them where they are."""

    def __init__(self, device: torch.device | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.device = None if device is None else torch.empty(0, device=device).device  # with its index
        self.max_bytes = max_bytes
        self._heads: OrderedDict[Hashable, CachedHead] = OrderedDict()
        self._terms: dict[int, tuple[Term, Term]] = {}  # id of the captured term -> captured term, its copy

    @property
    def used_bytes(self) -> int:
        """Bytes that the copies of heads and terms take."""
        terms = sum(x.nbytes for _, copied in self._terms.values() for x in copied.tensors())
        return terms + sum(cached.size for cached in self._heads.values())

    def get(self, name: Hashable) -> HeadView | None:
        """Return a cached head, or None."""
        if name not in self._heads:
            return None
        self._heads.move_to_end(name)
        return self._heads[name].head

    def add(self, name: Hashable, A: Weights, batch: int, head: int, stored: StoredMap | None) -> HeadView:
        """Cache one head of the weights, with its stored map if there is one; evict others if the cache is full."""
        if self.device is None or is_at(A, self.device):
            cached = CachedHead(HeadView(A, batch, head, stored))
        else:
            cached = self._copy_to_device(A, batch, head, stored, self.device)
        self._heads.pop(name, None)
        self._heads[name] = cached
        while self.used_bytes > self.max_bytes and len(self._heads) > 1:
            self._heads.popitem(last=False)
            used = {id(term) for remaining in self._heads.values() for term in remaining.terms}
            self._terms = {key: pair for key, pair in self._terms.items() if id(pair[1]) in used}
        return cached.head

    def _copy_to_device(
        self, A: Weights, batch: int, head: int, stored: StoredMap | None, device: torch.device
    ) -> CachedHead:
        call, b, h = A.call, slice(batch, batch + 1), slice(head, head + 1)
        kv = head * call.k.shape[1] // call.q.shape[1]
        q, k = DeviceRows(call.q[b, h], device), DeviceRows(call.k[b, kv : kv + 1], device)
        statistic = None if A.known_statistic is None else DeviceRows(A.known_statistic[b, h], device)
        by_row = [q] if statistic is None else [q, statistic]
        terms: Any = {slot: self._term(getattr(call, slot), device) for slot in SLOTS}
        numbers = {"batch_ids": batch, "head_ids": head}
        ids: Any = {name: _original_id(getattr(call, name), n, device) for name, n in numbers.items()}

        def fetch(rows: slice | Tensor, cols: slice) -> None:
            for buffer in by_row:
                buffer.fetch(rows)
            k.fetch(cols)

        copied = replace(call, q=q.copied, k=k.copied, v=None, lead=(1,), **terms, **ids)
        view = HeadView(Weights(copied, None if statistic is None else statistic.copied), 0, 0, stored, fetch)
        return CachedHead(view, sum(buffer.copied.nbytes for buffer in (*by_row, k)), copied.terms)

    def _term(self, term: Term | None, device: torch.device) -> Term | None:
        """Return the term on the device; all heads that share a term share its copy."""
        if term is None or not term.tensors():
            return term
        if id(term) not in self._terms:
            self._terms[id(term)] = term, to_device(term, device)
        return self._terms[id(term)][1]


class DeviceRows:
    """A tensor 1 1 n d on another device, filled on demand: `copied` is valid in the rows fetched so far."""

    def __init__(self, source: Tensor, device: torch.device) -> None:
        self.copied = torch.empty(source.shape, dtype=source.dtype, device=device)
        self._source = source
        self._missing = set(range(-(-source.shape[2] // ROWS_PER_COPY)))  # numbers of chunks of rows

    def fetch(self, rows: slice | Tensor) -> None:
        """Copy the chunks that hold these rows, unless they have been copied before."""
        if isinstance(rows, slice):
            chunks = range(rows.start // ROWS_PER_COPY, -(-rows.stop // ROWS_PER_COPY))
        else:
            chunks = (rows // ROWS_PER_COPY).unique().tolist()
        for chunk in sorted(self._missing.intersection(chunks)):
            at = slice(chunk * ROWS_PER_COPY, (chunk + 1) * ROWS_PER_COPY)
            self.copied[:, :, at] = self._source[:, :, at]
            self._missing.remove(chunk)


def is_at(A: Weights, device: torch.device) -> bool:
    """Whether these weights are computed on the device already."""
    return A.device == device


def _original_id(ids: Tensor | None, n: int, device: torch.device) -> Tensor:
    """Return, on a device, the number that batch row or head n had before a selection."""
    return torch.tensor([n], device=device) if ids is None else ids[n : n + 1].to(device)
