"""Recorder: takes in every attention of a watched model, one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ..ops.term import Term
from .reading import Reader
from .record import Record, Seen
from .reduced import Reduced, reduce
from .steps import Memo, looks_back_only
from .storage import Store

Key = tuple[str, int]
SLOTS = ("score", "mask", "bias", "normalize")


@dataclass(eq=False, kw_only=True)
class Recorder:
    """What a capture has seen, and what it was asked to keep of it."""

    store: Store
    layers: Sequence[str] | None = None
    heads: list[int] | None = None
    keep: Sequence[str] | None = None
    values: bool = False
    gradients: bool = False
    entries: dict[Key, Record | Reduced] = field(default_factory=dict)
    memo: Memo = field(default_factory=dict)
    passed_over: set[str] = field(default_factory=set)  # layers that attended and were not asked for
    projecting: Record | None = None  # whose heads the next linear map joins

    def __post_init__(self) -> None:
        self.reader = Reader(self.store)
        self._latest: dict[str, Key] = {}
        self._generated: set[Key] | None = None  # entries of the generation under way
        self._lineage: list[int] | None = None  # where batch rows were, if this pass goes on with an earlier one

    def see(self, name: str, seen: Seen, out: Tensor, heads: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Take in one attention of a layer; `heads` makes b h i e of the gradient of its output `out`.

        To be called where no gradients are recorded.
        """
        if self.layers is not None and not any(fnmatchcase(name, pattern) for pattern in self.layers):
            self.passed_over.add(name)
            return
        seen = _cast(_detached(seen))
        if self.heads is not None and not set(self.heads) <= set(range(seen.q.shape[1])):
            raise IndexError(f"heads must be from 0 to {seen.q.shape[1] - 1} in {name!r}, got heads={self.heads}")
        if self.keep is not None:
            record = Record(name, seen, Store(), heads=self.heads, values=False)
            key = self._next(name)
            self.entries[key] = reduce(record.weights({}), self.keep, self.store, name)
        elif not self._joined(name, seen):
            key = self._next(name, rows=seen.q.shape[2])
            self.entries.pop(key, None)
            record = Record(name, seen, self.store, heads=self.heads, values=self.values)
            self.entries[key] = record
            self.projecting = record if self.values else None
            if self.gradients:
                _keep_gradient(record, out, heads)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Calls within are of one text that grows: without a cache, each longer pass replaces the one before."""
        self._generated = set()
        try:
            yield
        finally:
            self._generated = None

    def close(self) -> None:
        """Nothing more will be seen."""
        self._latest.clear()
        for entry in self.entries.values():
            if isinstance(entry, Record):
                entry.close()

    def _joined(self, name: str, seen: Seen) -> bool:
        """Let the layer's latest record go on with this call, if it does."""
        latest = self.entries.get(self._latest.get(name, ("", -1)))
        parents = latest.follow(seen, self._lineage) if isinstance(latest, Record) else None
        if parents is not None:
            self._lineage = parents
        elif seen.q.shape[2] == seen.k.shape[2] or looks_back_only(seen.mask):
            self._lineage = None
        return parents is not None

    def _next(self, name: str, rows: int | None = None) -> Key:
        """The key of a new entry; that of an entry it replaces where a text is written without a cache."""
        key = self._latest.get(name, (name, -1))
        old = self.entries.get(key)
        grows = self._generated is not None and key in self._generated
        if not (grows and rows is not None and isinstance(old, Record) and rows > old.rows):
            key = name, key[1] + 1
        elif isinstance(old, Record):
            old.forget()
        self._latest[name] = key
        if self._generated is not None:
            self._generated.add(key)
        return key


def _detached(seen: Seen) -> Seen:
    """Terms without gradients; what is a parameter is copied, for an optimizer writes to it in place."""

    def own(x: Tensor) -> Tensor:
        return x.detach().clone() if x.is_leaf and x.requires_grad else x.detach()

    learned = {name: term for name in SLOTS if (term := getattr(seen, name)) is not None and _learned(term)}
    return replace(seen, **{name: term.map_tensors(own) for name, term in learned.items()}) if learned else seen


def _learned(term: Term) -> bool:
    return any(x.requires_grad for x in term.tensors())


def _cast(seen: Seen) -> Seen:
    """Queries and keys as the kernel sees them under autocast."""
    device = seen.q.device.type
    if not torch.is_autocast_enabled(device) or seen.q.dtype == torch.float64:
        return seen
    dtype = torch.get_autocast_dtype(device)
    return replace(seen, q=seen.q.to(dtype), k=seen.k.to(dtype), v=seen.v.to(dtype))


def _keep_gradient(record: Record, out: Tensor, heads: Callable[[Tensor], Tensor]) -> None:
    if not out.requires_grad:
        raise ValueError(
            f"gradients=True needs a forward pass that records them, and the output of {record.name!r} does not; "
            "run the model without torch.no_grad(), on inputs or parameters that require gradients"
        )

    def keep(grad: Tensor) -> None:
        record.descend(heads(grad.detach()))

    out.register_hook(keep)
