"""Recorder: the consumer behind `capture`, which records every attention call of a model.

What
    One entry per (layer, call): a `Record` of q, k and terms, or a `Reduced` summary if `keep` was given.

How it flows
    The interception hands each call to `observe`, which interprets it and passes it to `record`. A call that goes on
    with the keys of the layer's latest entry, as in generation with a cache, joins that entry. Calls that can wait
    (`can_defer`) are held by `record_deferred` and interpreted when `entries` is first read.

Lifetimes
    A recorder is open while its `capture` is; then `close` joins the parts of each entry. All methods take one lock,
    because a model may run in several threads.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ...ops.call import SLOTS
from ..capture_warning import CaptureWarning
from ..interception.kernel_call import NotUnderstood
from ..layer_names import matches, shown_name
from .generation import Memo, looks_back_only
from .observed import ObservedAttention
from .record import Record
from .reduced import Reduced, reduce
from .store import Store, TermSnapshots, owns_unmodified_memory

if TYPE_CHECKING:
    from ..interception.intercepted import InterceptedAttention

Key = tuple[str, int]
NOTHING = None, None, None, None


@dataclass(eq=False, kw_only=True)
class Recorder:
    """What a capture has seen, and what it was asked to keep of it."""

    store: Store
    layers: Sequence[str] | None = None
    heads: list[int] | None = None
    keep: Sequence[str] | None = None
    values: bool = False
    gradients: bool = False
    memo: Memo = field(default_factory=dict)
    passed_over: set[str] = field(default_factory=set)  # layers that attended and were not asked for

    def __post_init__(self) -> None:
        self._copies = TermSnapshots(self.store if self.keep is None else None)
        self._lock = threading.RLock()  # a model may run in several threads
        self._entries: dict[Key, Record | Reduced] = {}
        self._waiting: dict[str, Callable[[], ObservedAttention]] = {}  # calls of layers that nobody has looked at yet
        beside = self.layers, self.heads, self.keep, self.store.limit
        self._patient = beside == NOTHING and not (self.values or self.gradients) and self.store.in_place
        self.is_open = True
        self._latest: dict[str, Key] = {}
        self._generated: set[Key] | None = None  # entries of the generation under way
        self._lineage: Tensor | None = None  # which rows batch rows may have been, if this pass goes on with another

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a tape cannot be copied or pickled as it was captured; write tape.save(path), and "
            "regard.lens.Tape.load(path) for another of the same"
        )

    @property
    def entries(self) -> dict[Key, Record | Reduced]:
        """What was kept of each call of a layer, in order."""
        self._settle()
        return self._entries

    @property
    def ended(self) -> list[bool]:
        """Of each text that a layer began with, whether it has ended and is gone, in the layer where most are."""
        if not self._entries:
            return []
        records = [entry for entry in self._entries.values() if isinstance(entry, Record)]
        return max((record.ended.tolist() for record in records), key=sum, default=[])

    @property
    def is_empty(self) -> bool:
        """Has nothing been seen?"""
        return not (self._entries or self._waiting)

    def should_record(self, name: str) -> bool:
        """Is a layer of this name asked for?"""
        return self.layers is None or any(matches(name, pattern) for pattern in self.layers)

    def can_defer(self, name: str, q: Tensor, k: Tensor) -> bool:
        """Is it enough to hold on to the queries and keys of this call until somebody looks?

        It is where they need no copy, go on with no call before, and nothing but them is asked for.
        """
        return (
            self._patient
            and self._generated is None
            and name not in self._waiting
            and name not in self._latest
            and not (q.requires_grad or k.requires_grad or torch._C._is_any_autocast_enabled())
            and owns_unmodified_memory(q)
            and owns_unmodified_memory(k)
        )

    def record_deferred(self, name: str, call: Callable[[], ObservedAttention]) -> None:
        """Take in one attention of a layer that may wait: a short pass takes no longer than its Python."""
        with self._lock:
            if name in self._waiting:  # another thread was faster
                self._settle()
            self._waiting[name] = call

    def record(
        self, name: str, seen: ObservedAttention, out: Tensor, heads: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Record | None:
        """Take in one attention of a layer; `heads` makes b h i e of the gradient of its output `out`.

        To be called where no gradients are recorded, with terms that have none. Returns what has begun with it and
        wants a projection.
        """
        with self._lock:
            return self._record(name, seen, out, heads)

    def copy_terms(self, seen: ObservedAttention, *slots: str) -> ObservedAttention:
        """The call with terms of our own in these slots, without gradients: others may write to theirs."""
        terms = {name: term for name in slots if (term := getattr(seen, name)) is not None}
        with self._lock:
            return seen._replace(**{name: self._copies.copy(term) for name, term in terms.items()})

    def observe(self, attention: InterceptedAttention) -> Tensor:
        """Record an attention call; return its output as it is."""
        layer, out = attention.layer, attention.out
        if not self.should_record(layer):
            self.passed_over.add(layer)
            return out
        with torch.no_grad():
            observed = attention.observed()
            if isinstance(observed, NotUnderstood):
                warnings.warn(f"{shown_name(layer)} was not recorded: {observed}", CaptureWarning, stacklevel=2)
                return out
            # Later writes of the model must not change the tape. Other masks and biases are copies already.
            slots = SLOTS if attention.has_terms else ("normalize",)
            record = self.record(layer, self.copy_terms(observed, *slots), out, attention.layout.heads)
            if record is not None:
                attention.await_projection(partial(self.project, record))
        return out

    def project(self, record: Record, weight: Tensor) -> None:
        """Note the output projection of an attention."""
        with self._lock:
            record.project(weight)

    def _record(
        self, name: str, seen: ObservedAttention, out: Tensor, heads: Callable[[Tensor], Tensor]
    ) -> Record | None:
        if not self.should_record(name):
            self.passed_over.add(name)
            return None
        self._settle()
        seen = _cast(seen)
        if self.heads is not None and not set(self.heads) <= set(range(seen.q.shape[1])):
            most = seen.q.shape[1] - 1
            raise IndexError(f"heads must be from 0 to {most} in {shown_name(name)!r}, got heads={self.heads}")
        if self.keep is not None:
            record = Record(name, seen, Store(), heads=self.heads, values=False)
            key = self._next(name)
            self._entries[key] = reduce(record.weights({}), self.keep, self.store, shown_name(name))
        elif not self._joined(name, seen):
            key = self._next(name, seen)
            record = Record(name, seen, self.store, heads=self.heads, values=self.values)
            self._entries[key] = record
            if self.gradients:
                _keep_gradient(record, out, heads)
            return record if self.values else None
        return None

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Calls within are of one text that grows: without a cache, each longer pass replaces the one before."""
        self._settle()
        self._generated, self._lineage = set(), None
        try:
            yield
        finally:
            self._generated = None

    def close(self) -> None:
        """Nothing more will be seen."""
        self.is_open = False
        self._latest.clear()
        for entry in self._entries.values():
            if isinstance(entry, Record):
                entry.close()

    def _settle(self) -> None:
        """Take in what waits."""
        if not self._waiting:
            return
        with self._lock, torch.no_grad():
            waiting, self._waiting = self._waiting, {}
            for name, call in waiting.items():
                record = Record(name, call()._replace(version=0), self.store, heads=None, values=False)
                self._entries[self._next(name)] = record
                if not self.is_open:
                    record.close()

    def _joined(self, name: str, seen: ObservedAttention) -> bool:
        """Let the layer's latest record go on with this call, if it does."""
        latest = self._entries[self._latest[name]] if name in self._latest else None
        parents = latest.follow(seen, self._lineage) if isinstance(latest, Record) else None
        if parents is not None:
            self._lineage = parents
        elif self._lineage is not None and (seen.q.shape[2] == seen.k.shape[2] or looks_back_only(seen.mask)):
            self._lineage = None
        return parents is not None

    def _next(self, name: str, seen: ObservedAttention | None = None) -> Key:
        """The key of a new entry; that of an entry it replaces where a text is written without a cache."""
        key = self._latest.get(name, (name, -1))
        if self._generated is None:
            key = self._latest[name] = name, key[1] + 1
            return key
        old = self._entries.get(key)
        if seen is not None and key in self._generated and isinstance(old, Record) and seen.q.shape[2] > old.rows:
            old.forget()
            del self._entries[key]
        else:
            key = self._latest[name] = name, key[1] + 1
        self._generated.add(key)
        return key


def _cast(seen: ObservedAttention) -> ObservedAttention:
    """Queries and keys as the kernel sees them under autocast."""
    device = seen.q.device.type
    if not torch.is_autocast_enabled(device) or seen.q.dtype == torch.float64:
        return seen
    dtype = torch.get_autocast_dtype(device)
    return seen._replace(q=seen.q.to(dtype), k=seen.k.to(dtype), v=seen.v.to(dtype))


def _keep_gradient(record: Record, out: Tensor, heads: Callable[[Tensor], Tensor]) -> None:
    if not out.requires_grad:
        raise ValueError(
            "gradients=True needs a forward pass that records them, and the output of "
            f"{shown_name(record.name)!r} does not; run the model without torch.no_grad(), on inputs or parameters "
            "that require gradients, and where it computes layers again in its backward pass with use_reentrant=False"
        )

    def keep(grad: Tensor) -> None:
        record.descend(heads(grad.detach()))

    out.register_hook(keep)
