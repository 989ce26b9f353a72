"""Stage: the heads somebody looks at, on the device where their tiles are computed.

Without a device they stay where their capture is. On one, q, k and the row statistic of a head are brought there when
it is first looked at; when room gets short, those not looked at longest leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..lens.steps import moved
from ..ops.lazy import Weights
from ..ops.term import Term
from .sheet import Head

ROOM = 2 * 2**30  # bytes of heads on a device
SLOTS = ("score", "mask", "bias", "normalize")


class Stage:
    """Heads by name; `device` is where they are computed, None for where they are."""

    def __init__(self, device: torch.device | None = None, room: int = ROOM) -> None:
        self.device, self.room, self.taken = device, room, 0
        self._heads: OrderedDict[Hashable, tuple[Head, int]] = OrderedDict()
        self._terms: dict[int, tuple[Term, Any]] = {}  # of whole captures, each brought once

    def get(self, name: Hashable) -> Head | None:
        """A head that is here."""
        if name not in self._heads:
            return None
        self._heads.move_to_end(name)
        return self._heads[name][0]

    def bring(self, name: Hashable, A: Weights, batch: int, head: int, map: Tensor | None) -> Head:
        """One head of these weights, with its map where there is one."""
        if self.device is None:
            found, size = Head(A, batch, head, map), 0
        else:
            one = self._moved(A.select(batch=batch, heads=head), self.device)
            found, size = Head(one, 0, 0, map), sum(x.nbytes for x in _own(one))
        self.taken += size - self._heads.pop(name, (None, 0))[1]
        self._heads[name] = found, size
        while self.taken > self.room and len(self._heads) > 1:
            self.taken -= self._heads.popitem(last=False)[1][1]
        return found

    def _moved(self, A: Weights, device: torch.device) -> Weights:
        call, known = A.call, A.known_statistic
        terms: Any = {slot: self._term(getattr(call, slot), device) for slot in SLOTS}
        ids: Any = {name: _to(getattr(call, name), device) for name in ("batch_ids", "head_ids")}
        return Weights(replace(call, q=call.q.to(device), k=call.k.to(device), **terms, **ids), _to(known, device))

    def _term(self, term: Term | None, device: torch.device) -> Any:
        if term is None:
            return None
        if id(term) not in self._terms:
            self._terms[id(term)] = term, moved(term, device)
        return self._terms[id(term)][1]


def _to(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)


def _own(A: Weights) -> list[Tensor]:
    """What a head alone takes."""
    return [A.call.q, A.call.k, *([] if A.known_statistic is None else [A.known_statistic])]
