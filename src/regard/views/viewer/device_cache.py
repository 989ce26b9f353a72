"""Stage: the heads somebody looks at, on the device where their tiles are computed.

Without a device, and where a capture is on it already, they stay where they are. Else the rows of q, k and the row
statistic that a tile of a head needs are brought when they are first looked at, straight from the capture. When room
gets short, the heads not looked at longest leave, and with them the terms that no other has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...lens.recording.generation import moved
from ...ops.call import SLOTS
from ...ops.terms.term import Term
from ...ops.weights import Weights
from .matrix_view import Head
from .row_strip import Strip

ROOM = 2 * 2**30  # bytes of heads and terms on a device


class Staged(NamedTuple):
    """A head, the bytes it takes, and the terms it has, where they are on a device for it."""

    head: Head
    size: int = 0
    terms: tuple[Term, ...] = ()


class Stage:
    """Heads by name; `device` is where they are computed, None for where they are."""

    def __init__(self, device: torch.device | None = None, room: int = ROOM) -> None:
        self.device = None if device is None else torch.empty(0, device=device).device  # with its number
        self.room = room
        self._heads: OrderedDict[Hashable, Staged] = OrderedDict()
        self._terms: dict[int, tuple[Term, Term]] = {}  # as captures have them, by identity, and on the device

    @property
    def taken(self) -> int:
        """Bytes of the heads and terms that were brought."""
        terms = sum(x.nbytes for _, here in self._terms.values() for x in here.tensors())
        return terms + sum(staged.size for staged in self._heads.values())

    def get(self, name: Hashable) -> Head | None:
        """A head that is here."""
        if name not in self._heads:
            return None
        self._heads.move_to_end(name)
        return self._heads[name].head

    def bring(self, name: Hashable, A: Weights, batch: int, head: int, map: Tensor | None) -> Head:
        """One head of these weights, with its map where there is one."""
        if self.device is None or is_at(A, self.device):
            staged = Staged(Head(A, batch, head, map))
        else:
            staged = self._brought(A, batch, head, map, self.device)
        self._heads.pop(name, None)
        self._heads[name] = staged
        while self.taken > self.room and len(self._heads) > 1:
            self._heads.popitem(last=False)
            used = {id(term) for one in self._heads.values() for term in one.terms}
            self._terms = {key: pair for key, pair in self._terms.items() if id(pair[1]) in used}
        return staged.head

    def _brought(self, A: Weights, batch: int, head: int, map: Tensor | None, device: torch.device) -> Staged:
        call, b, h = A.call, slice(batch, batch + 1), slice(head, head + 1)
        kv = head * call.k.shape[1] // call.q.shape[1]
        q, k = Strip(call.q[b, h], device), Strip(call.k[b, kv : kv + 1], device)
        statistic = None if A.known_statistic is None else Strip(A.known_statistic[b, h], device)
        by_row = [q] if statistic is None else [q, statistic]
        terms: Any = {slot: self._term(getattr(call, slot), device) for slot in SLOTS}
        numbers = {"batch_ids": batch, "head_ids": head}
        ids: Any = {name: _number(getattr(call, name), n, device) for name, n in numbers.items()}

        def fetch(rows: slice | Tensor, cols: slice) -> None:
            for strip in by_row:
                strip.need(rows)
            k.need(cols)

        one = replace(call, q=q.here, k=k.here, v=None, lead=(1,), **terms, **ids)
        found = Head(Weights(one, None if statistic is None else statistic.here), 0, 0, map, fetch)
        return Staged(found, sum(strip.here.nbytes for strip in (*by_row, k)), one.terms)

    def _term(self, term: Term | None, device: torch.device) -> Term | None:
        """A term on the device, brought once for all heads that have it."""
        if term is None or not term.tensors():
            return term
        if id(term) not in self._terms:
            self._terms[id(term)] = term, moved(term, device)
        return self._terms[id(term)][1]


def is_at(A: Weights, device: torch.device) -> bool:
    """Are these weights computed there as they are?"""
    return A.device == device


def _number(ids: Tensor | None, n: int, device: torch.device) -> Tensor:
    """The original number of the n-th, on a device."""
    return torch.tensor([n], device=device) if ids is None else ids[n : n + 1].to(device)
