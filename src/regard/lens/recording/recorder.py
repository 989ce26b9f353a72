"""Recorder: the consumer behind `capture`, which records every attention call of a model.

What
    One entry per (layer, call): a `Record` of q, k and terms, or a `Reduced` summary if `keep` was given; for a softmax
    over the edges of a graph its `EdgeWeights`, for sampled points their `SampledWeights`, whatever `keep` is.

How it flows
    The interception hands each call to `observe`, which interprets it and passes it to `record`. A call that goes on
    with the keys of the layer's latest entry, as in generation with a cache, joins that entry. Calls that can wait
    (`can_defer`) are held by `record_deferred` and interpreted when `entries` is first read. Steps of a generation that
    add one token per text (`can_hold`) are held by `hold_step` and recorded many at a time, since recording a call
    takes longer than a layer of such a step.

Lifetimes
    A recorder is open while its `capture` is; then `close` joins the parts of each entry. All methods take one lock,
    because a model may run in several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ... import torch_internals
from ...ops.call import SLOTS
from ..interception.kernel_call import NotUnderstood
from ..interception.sdpa import lse_is_reliable
from ..layer_names import matches, shown_name
from ..real_tokens import SharedRealTokens, with_own_queries
from ..terms.changed_weights import Given
from .generation import Memo, looks_back_only, to_device
from .observed import ObservedAttention, weights_of_observed
from .record import Record, checksums
from .reduced import Reduced, reduce
from .sampled_weights import SparseWeights
from .store import Store, TermSnapshots, owns_unmodified_memory, version_of
from .unseen import Unseen, failure_reason
from .written_rows import WrittenRows, have_weights

if TYPE_CHECKING:
    from ...ops.weights import Weights
    from ..interception.intercepted import InterceptedAttention

Key = tuple[str, int]
TOLERANCE = 0.03  # error of weights relative to the largest of a row
NOT_WEIGHTS = (
    "the weights that it multiplies with v are not the softmax of its scores, as they were in layers like it; "
    "capture it once more, and it is analyzed in full"
)
MAX_HELD_BYTES = 2**27  # single-token steps are recorded together once their keys take more memory
MAX_COPIED_BYTES = 2**18  # the keys of a step, on the CPU
HELD_SHARE = 16  # on a GPU, once their keys take more than this part of its free memory too


class WrittenWeights(NamedTuple):
    """Rows of weights that a model computed by itself."""

    found: Tensor  # b h rows j
    rows: slice
    scale: float


class Unproved(NamedTuple):
    """Rows of weights that wait to be compared."""

    rows: WrittenRows
    failed: Callable[[], None]


class HeldStep(NamedTuple):
    """A call with one new token per text, which waits to be recorded together with those after it."""

    layer: str
    q: Tensor  # b h 1 d
    k: Tensor  # b g j d
    options: dict[str, Any]
    # Reads queries, those of several steps or of one, and the keys of the last; the options are equal for all.
    read: Callable[[Tensor, Tensor], ObservedAttention]


@dataclass(eq=False, kw_only=True)
class Recorder:
    """The recorded attention calls of a capture, and the options that say what to keep."""

    store: Store
    layers: Sequence[str] | None = None
    heads: list[int] | None = None
    keep: Sequence[str] | None = None
    values: bool = False
    gradients: bool = False
    counts: Callable[[], bool] | None = None  # calls are recorded only while it returns True; None for always
    pass_ended: Callable[[], None] | None = None  # called when a forward pass of the model ends
    memo: Memo = field(default_factory=dict)
    passed_over: set[str] = field(default_factory=set)  # layers that attended but match no pattern in `layers`
    changed: dict[str, str] = field(default_factory=dict)  # layer -> how the model changed weights after the softmax
    dense_bytes: dict[str, int] = field(default_factory=dict)  # layer -> memory of its changed weights, if kept densely
    # Layer -> attention function that is no softmax(q @ k.mT), and the bytes of the weights kept instead of q and k.
    returned: dict[str, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._snapshots = TermSnapshots(self.store if self.keep is None else None)
        self._lock = threading.RLock()  # a model may run in several threads
        self._entries: dict[Key, Record | Reduced | SparseWeights] = {}
        # Calls that are interpreted when `entries` is read.
        self._deferred: dict[str, Callable[[], ObservedAttention]] = {}
        self._unproved: dict[str, Unproved] = {}  # deferred calls whose weights wait to be compared
        self._held: list[HeldStep] = []
        self._held_rows: dict[str, int] = {}  # layer -> its steps that are held
        self._held_bytes = 0
        self._held_share: int | None = None
        self._unseen: dict[tuple[str, str], Unseen] = {}
        self.guessed: dict[str, str] = {}  # layer -> why the choice between batch and heads is a guess
        keeps_all = self.layers is None and self.heads is None and self.keep is None and self.store.limit is None
        self._may_defer = keeps_all and not (self.values or self.gradients) and self.store.in_place
        self.is_open = True
        self._latest: dict[str, Key] = {}
        self._real_of_mask = SharedRealTokens()
        self._generated: set[Key] | None = None  # entries of the running generation
        # Parents of the batch rows, found by an earlier layer of this pass; None if the pass continues no earlier one.
        self._lineage: Tensor | None = None

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a captured tape cannot be copied or pickled; "
            "write tape.save(path), and regard.lens.Tape.load(path) for a copy"
        )

    @property
    def entries(self) -> dict[Key, Record | Reduced | SparseWeights]:
        """Recorded attention per (layer, call), in call order."""
        self._record_deferred_calls()
        return self._entries

    @property
    def ended(self) -> list[bool]:
        """For each row of the first batch: whether it left the batch. Taken from the layer that lost the most rows.

        Empty if no row did.
        """
        if self._held:
            self._record_held_steps()
        records = [entry for entry in self._entries.values() if isinstance(entry, Record)]
        return max((record.ended.tolist() for record in records if record.ended is not None), key=sum, default=[])

    @property
    def is_empty(self) -> bool:
        """True if no attention call was recorded."""
        if self._unproved:
            self._prove_deferred_calls()
        return not (self._entries or self._deferred)

    @property
    def recorded_layers(self) -> list[str]:
        """The names of the recorded layers in call order, each once; deferred calls stay deferred."""
        if self._unproved:
            self._prove_deferred_calls()
        return list(dict.fromkeys([*(layer for layer, _ in self._entries), *self._deferred]))

    @property
    def unseen(self) -> list[Unseen]:
        """Layers that were left out, in the order in which they were noted."""
        if self._unproved:
            self._prove_deferred_calls()
        return list(self._unseen.values())

    def note_unseen(self, layer: str, kind: str, reason: str) -> None:
        """Note a layer that mixes positions and is not recorded; the first reason per layer and kind is kept.

        Layers that match no pattern in `layers` are not noted.
        """
        if self.should_record(layer):
            with self._lock:
                self._unseen.setdefault((layer, kind), Unseen(layer, kind, reason))

    def note_returned(self, layer: str, function: str, size: int) -> None:
        """Note that the weights which an attention function returned are recorded, `size` bytes more."""
        with self._lock:
            self.returned[layer] = function, size + self.returned.get(layer, ("", 0))[1]

    @property
    def keeps_tensors(self) -> bool:
        """True if queries and keys are kept as the model computed them, without a copy."""
        return self.keep is None and self.store.in_place

    def order_unseen(self, names: Iterable[str]) -> None:
        """Sort the notes by the order in which the model names its modules."""
        position = {name: n for n, name in enumerate(names)}
        with self._lock:
            noted = sorted(self._unseen.items(), key=lambda note: position.get(note[0][0], len(position)))
            self._unseen = dict(noted)

    def should_record(self, name: str) -> bool:
        """Whether the name of a layer matches a pattern in `layers`."""
        return self.layers is None or any(matches(name, pattern) for pattern in self.layers)

    def is_wanted(self, name: str) -> bool:
        """Whether to record a layer that attends now; `passed_over` gets its name if it matches no pattern."""
        return (self.layers is None or self._matches_pattern(name)) and (self.counts is None or self.counts())

    def _matches_pattern(self, name: str) -> bool:
        if not self.should_record(name):
            self.passed_over.add(name)
            return False
        return True

    def can_defer(self, name: str, q: Tensor, k: Tensor) -> bool:
        """Whether a call can be interpreted later, when `entries` is read.

        It can if its queries and keys need no copy, it continues no earlier call, and only queries and keys are kept.
        """
        return (
            self._may_defer
            and self._generated is None
            and name not in self._deferred
            and name not in self._latest
            and not (q.requires_grad or k.requires_grad or torch_internals.is_any_autocast_enabled())
            and owns_unmodified_memory(q)
            and owns_unmodified_memory(k)
        )

    def defer_copy(
        self,
        name: str,
        terms: ObservedAttention,
        q: Tensor,
        k: Tensor,
        written: WrittenWeights | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> bool:
        """Hold a call until `entries` is read, with copies of what the model may write to; False if it cannot wait.

        `terms` are those of the call, with any tensors. If the model wrote its weights out, some rows of them are
        compared before the call is recorded. `failed` is called if they differ.
        """
        if not self._may_defer or self._generated is not None or name in self._deferred or name in self._latest:
            return False
        if q.requires_grad or k.requires_grad or torch_internals.is_any_autocast_enabled():
            return False
        if q.is_inference() or k.is_inference():  # they count no writes, and neither do their copies here
            return False
        if q._version or q.untyped_storage().nbytes() > q.nbytes:
            q = self.store.copy(q)
        if k._version or k.untyped_storage().nbytes() > k.nbytes:
            k = self.store.copy(k)
        with self._lock:
            if name in self._deferred:  # another thread deferred a call of this layer meanwhile
                return False
            self._deferred[name] = partial(terms._replace, q=q, k=k)
            if written is not None:
                rows = WrittenRows(q, k, self.store.copy(written.found), written.rows, written.scale, 0)
                self._unproved[name] = Unproved(rows, failed)
        return True

    def _prove_deferred_calls(self) -> None:
        """Compare the weights that wait for it; leave out the layers whose weights differ."""
        with self._lock, torch.no_grad():
            unproved, self._unproved = self._unproved, {}
            verdicts = have_weights([each.rows for each in unproved.values()], TOLERANCE)
            for (name, each), is_proved in zip(unproved.items(), verdicts, strict=True):
                if not is_proved:
                    self._deferred.pop(name, None)
                    self.note_unseen(name, "attention", NOT_WEIGHTS)
                    each.failed()

    def record_deferred(self, name: str, call: Callable[[], ObservedAttention]) -> None:
        """Hold a call until `entries` is read, so that capture adds little time to a short forward pass."""
        with self._lock:
            if name in self._deferred:  # another thread deferred a call of this layer meanwhile
                self._record_deferred_calls()
            self._deferred[name] = call

    def can_hold(self, name: str, q: Tensor, k: Tensor) -> bool:
        """Whether a call without a mask adds one token per text to the latest entry of its layer, and may wait."""
        if not self._may_defer or q.shape[2] != 1 or self.counts is not None:
            return False
        entry = self._entries.get(self._latest.get(name, (name, -1)))
        return (
            isinstance(entry, Record)
            and entry.normalize is None
            and q.shape[0] == k.shape[0] == entry.batch
            and k.shape[2] == entry.keys + self._held_rows.get(name, 0) + 1
            and not (q.requires_grad or k.requires_grad or torch_internals.is_any_autocast_enabled())
            and owns_unmodified_memory(q)
            and owns_unmodified_memory(k)
        )

    def hold_step(self, step: HeldStep) -> None:
        """Hold a call until the keys that are held take too much memory, or until another call or a reader needs it."""
        with self._lock:
            self._held.append(step)
            self._held_rows[step.layer] = self._held_rows.get(step.layer, 0) + 1
            self._held_bytes += step.k.nbytes
            if self._held_bytes > MAX_HELD_BYTES and self._held_bytes > self._held_limit(step.k.device):
                self._record_held_steps()

    def _held_limit(self, device: torch.device) -> int:
        """Return how many bytes of keys may be held: on a GPU a share of what is free, for recording them waits."""
        if device.type != "cuda":
            return MAX_HELD_BYTES
        if self._held_share is None:
            self._held_share = torch.cuda.mem_get_info(device)[0] // HELD_SHARE
        return self._held_share

    def record(
        self,
        name: str,
        observed: ObservedAttention,
        out: Tensor | None = None,
        heads: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Record | None:
        """Record one attention call; `heads` rearranges the gradient of its output `out` to b h i e.

        The caller disables autograd and passes terms without gradients. Returns a new record that needs the output
        projection, else None.
        """
        with self._lock:
            return self._record(name, observed, out, heads)

    def copy_terms(self, observed: ObservedAttention, *slots: str) -> ObservedAttention:
        """Copy the terms in these slots, without gradients: the model may write to its own."""
        terms = {name: term for name in slots if (term := getattr(observed, name)) is not None}
        with self._lock:
            return observed._replace(**{name: self._snapshots.copy(term) for name, term in terms.items()})

    def observe(self, attention: InterceptedAttention) -> Tensor:
        """Record an attention call; return its output as it is."""
        layer, out = attention.layer, attention.out
        if not self.is_wanted(layer):
            return out
        with torch.no_grad():
            observed = _interpret(attention)
            if isinstance(observed, NotUnderstood):
                self.note_unseen(layer, "attention", str(observed))
                return out
            if attention.guess is not None:
                self.guessed.setdefault(layer, attention.guess)
            # Later writes of the model must not change the tape. Other masks and biases are copies already.
            slots = SLOTS if attention.has_terms else ("normalize",)
            observed = self._note_change(layer, observed) if observed.changed else self.copy_terms(observed, *slots)
            record = self.record(layer, observed, out, attention.layout.heads)
            if record is not None:
                attention.await_projection(partial(self.project, record))
        return out

    def _note_change(self, layer: str, observed: ObservedAttention) -> ObservedAttention:
        """Note how the weights were changed after the softmax, and copy them to the place of kept tensors."""
        with self._lock:
            self.note_changed(layer, observed.changed.split(", "))
            if not isinstance(observed.normalize, Given):
                return self.copy_terms(observed, "normalize")
            weights = observed.normalize.weights
            self.dense_bytes[layer] = self.dense_bytes.get(layer, 0) + weights.nbytes
            if self.store.in_place or self.keep is not None:
                return self.copy_terms(observed, "normalize")
            kept = self.store.put(weights, f"{shown_name(layer)}: weights")
            return observed._replace(normalize=Given(kept.get()))

    def note_changed(self, layer: str, changes: Iterable[str]) -> None:
        """Note how a layer changed its weights after the softmax."""
        with self._lock:
            steps = (*self.changed.get(layer, "").split(", "), *changes)
            self.changed[layer] = ", ".join(dict.fromkeys(filter(None, steps)))

    def record_sparse(self, name: str, A: SparseWeights) -> SparseWeights:
        """Record copies of weights over edges or sampled points, and return these; the model may write to its own."""

        def keep(x: Tensor, what: str) -> Tensor:
            return self.store.put(x.clone() if self.store.in_place else x, f"{shown_name(name)}: {what}").get()

        with self._lock:
            self._check_heads(name, A.shape[1])
            self._record_deferred_calls()
            chosen = A if self.heads is None else A.select_heads(self.heads)
            entry = self._entries[self._next_key(name)] = chosen.map_tensors(keep)
            return entry

    def latest_entry(self, name: str) -> Record | Reduced | SparseWeights | None:
        """Return the latest entry of a layer; None if it has none."""
        if self._held:
            self._record_held_steps()
        return self._entries.get(self._latest.get(name, (name, -1)))

    def withdraw(self, name: str, entry: Record | Reduced | SparseWeights) -> None:
        """Remove an entry of a layer that was recorded, and is no attention as a later call shows."""
        with self._lock:
            if self._held:
                self._record_held_steps()
            found = [key for key, each in self._entries.items() if each is entry]
            if not found:
                return
            if isinstance(entry, Record):
                entry.release()
            (_, call), entries = found[0], self._entries

            def key_after(key: Key) -> Key:
                return (name, key[1] - 1) if key[0] == name and key[1] > call else key

            self._entries = {key_after(key): each for key, each in entries.items() if each is not entry}
            if self._generated is not None:
                self._generated = {key_after(key) for key in self._generated if key != found[0]}
            last = self._latest[name][1] - 1
            self._latest[name] = name, last
            if last < 0:
                for notes in (self._latest, self.guessed, self.changed, self.dense_bytes):
                    notes.pop(name, None)

    def _check_heads(self, name: str, count: int) -> None:
        """Raise if `heads` names one that a layer does not have."""
        if self.heads is not None and not set(self.heads) <= set(range(count)):
            raise IndexError(f"heads must be from 0 to {count - 1} in {shown_name(name)!r}, got heads={self.heads}")

    def project(self, record: Record, weight: Tensor) -> None:
        """Keep the weight of the output projection of an attention."""
        with self._lock:
            record.add_projection(weight)

    def _record(
        self, name: str, observed: ObservedAttention, out: Tensor | None, heads: Callable[[Tensor], Tensor]
    ) -> Record | None:
        """Record one attention call, under the lock."""
        if not self._matches_pattern(name):
            return None
        self._record_deferred_calls()
        observed = _cast(observed)
        self._check_heads(name, observed.q.shape[1])
        if self.keep is not None:
            key, A = self._next_key(name), _weights_of_call(observed, self.heads)
            before = {
                other: entry.real for other in self._latest.values() if (entry := self._find_reduced(other)) is not None
            }
            real = with_own_queries(key, {**before, key: self._real_of_mask.of(A)})
            self._entries[key] = reduce(A, self.keep, self.store, shown_name(name), real)
        elif not self._continues(name, observed):
            key = self._next_key(name, observed)
            record = Record(name, observed, self.store, heads=self.heads, values=self.values)
            self._entries[key] = record
            if self.gradients and out is not None:
                _keep_gradient(record, out, heads)
            return record if self.values else None
        return None

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Treat the calls inside as one growing text: without a cache, each longer pass replaces the one before."""
        self._record_deferred_calls()
        self._generated, self._lineage = set(), None
        try:
            yield
        finally:
            if self._held:
                self._record_held_steps()
            self._generated = None

    def close(self) -> None:
        """End recording, and close all records."""
        if self._held:
            self._record_held_steps()
        if self._unproved:
            self._prove_deferred_calls()
        self.is_open = False
        self._latest.clear()
        for entry in self._entries.values():
            if isinstance(entry, Record):
                entry.close()

    def _find_reduced(self, key: Key) -> Reduced | None:
        """Return the kept measures of a call; None if it is not recorded yet."""
        entry = self._entries.get(key)
        return entry if isinstance(entry, Reduced) else None

    def _record_held_steps(self) -> None:
        """Record the steps that are held: those of a layer as one call, if each began with the keys before it."""
        with self._lock, torch.no_grad():
            held, self._held, self._held_rows, self._held_bytes = self._held, [], {}, 0
            layers: dict[str, list[HeldStep]] = {}
            for step in held:
                layers.setdefault(step.layer, []).append(step)
            if len(held) > len(layers) and not _extend_each_other(list(layers.values())):
                for step in held:
                    self._record(step.layer, self._read_steps([step]), step.q, lambda x: x)
                return
            for name, steps in layers.items():
                if len(steps) == 1 or not self._continues(name, self._read_steps(steps)):
                    for step in steps:
                        self._record(name, self._read_steps([step]), step.q, lambda x: x)

    def _read_steps(self, steps: Sequence[HeldStep]) -> ObservedAttention:
        """Return steps of one layer as one call: the queries of all steps, and the keys of the last.

        Its row statistic is computed if the entry that it continues has one.
        """
        last = steps[-1]
        q = last.q if len(steps) == 1 else torch.cat([step.q for step in steps], 2)
        # A tensor that was written to since is kept by the version it had, so that reading it raises.
        observed = last.read(q, last.k)._replace(version=0)
        entry = self._entries.get(self._latest[last.layer])
        if isinstance(entry, Record) and entry.has_statistic:
            statistic = observed.weights.statistic
            # A copy has version 0, as if it came from the kernel of the model.
            observed = observed._replace(statistic=None if statistic is None else statistic.clone())
        return observed

    def _record_deferred_calls(self) -> None:
        """Interpret and record the deferred calls, and the steps that are held."""
        if self._held:
            self._record_held_steps()
        if self._unproved:
            self._prove_deferred_calls()
        if not self._deferred:
            return
        with self._lock, torch.no_grad():
            deferred, self._deferred = self._deferred, {}
            for name, call in deferred.items():
                record = Record(name, call()._replace(version=0), self.store, heads=None, values=False)
                self._entries[self._next_key(name)] = record
                if not self.is_open:
                    record.close()

    def _continues(self, name: str, observed: ObservedAttention) -> bool:
        """Add the call to the layer's latest record if it continues it; return whether it does."""
        latest = self._entries[self._latest[name]] if name in self._latest else None
        parents = latest.follow(observed, self._lineage) if isinstance(latest, Record) else None
        if parents is not None:
            self._lineage = parents
        elif self._lineage is not None and (
            observed.q.shape[2] == observed.k.shape[2] or looks_back_only(observed.mask)
        ):
            self._lineage = None
        return parents is not None

    def _next_key(self, name: str, observed: ObservedAttention | None = None) -> Key:
        """Return the key of a new entry; in a generation without a cache, that of the shorter pass it replaces."""
        key = self._latest.get(name, (name, -1))
        if self._generated is None:
            key = self._latest[name] = name, key[1] + 1
            return key
        old = self._entries.get(key)
        if (
            observed is not None
            and key in self._generated
            and isinstance(old, Record)
            and observed.q.shape[2] > old.rows
        ):
            old.release()
            del self._entries[key]
        else:
            key = self._latest[name] = name, key[1] + 1
        self._generated.add(key)
        return key


def _extend_each_other(layers: Sequence[Sequence[HeldStep]]) -> bool:
    """Whether every step of a layer has the keys of the step before it and one more, and equal options.

    The host waits once for the checksums of all steps.
    """
    if any(a.options != b.options or version_of(a.k) != 0 for steps in layers for a, b in pairwise(steps)):
        return False
    return bool(torch.stack([_are_prefixes([step.k for step in steps]) for steps in layers if steps[1:]]).all())


def _are_prefixes(keys: Sequence[Tensor]) -> Tensor:
    """Return True if each tensor of keys begins with the one before it, by checksums: a single bool on the device."""
    lengths = [k.shape[2] for k in keys]
    if any(a > b for a, b in pairwise(lengths)):
        return torch.tensor(False, device=keys[0].device)
    if keys[-1].is_cuda or keys[-1].nbytes <= MAX_COPIED_BYTES:  # a copy takes less time than a call for each
        sums = checksums(torch.cat([*keys], 2))
    else:
        sums = torch.cat([checksums(k) for k in keys], 1)
    before = torch.tensor(lengths[:-1], device=sums.device)
    first = sums[:, : sum(lengths[:-1])]
    # Key n of a tensor is behind it by the length of that tensor in the next one.
    next_places = torch.arange(first.shape[1], device=sums.device) + before.repeat_interleave(
        before, output_size=first.shape[1]
    )
    return (first == sums.index_select(1, next_places)).all()


def _interpret(attention: InterceptedAttention) -> ObservedAttention | NotUnderstood:
    """Return an attention in terms, or why it has none; an error of the interpretation does not stop the model."""
    try:
        return attention.interpret()
    except (MemoryError, Warning):  # a budget is exceeded, or the caller turned warnings into errors
        raise
    except Exception as error:
        return NotUnderstood(failure_reason("reading its arguments", error))


def _weights_of_call(observed: ObservedAttention, heads: list[int] | None) -> Weights:
    """Return the weights of a call, of some heads or of all, to be read at once."""
    q, k, statistic = observed.q.detach(), observed.k.detach(), observed.statistic
    if heads is not None:
        h, g = q.shape[1], k.shape[1]
        q, k = q[:, heads], k[:, [head * g // h for head in heads]]
        statistic = None if statistic is None else statistic[:, heads]
    if statistic is not None and not lse_is_reliable(q, k):
        statistic = None
    terms: Any = {slot: _on_device(getattr(observed, slot), q.device) for slot in SLOTS}
    return weights_of_observed(q, k, heads, **terms, offset=observed.offset, statistic=statistic)


def _on_device(term: Any, device: torch.device) -> Any:
    """Return a term with its tensors on a device: the term itself, which layers share, if they are there."""
    return term if term is None or all(x.device == device for x in term.tensors()) else to_device(term, device)


def _cast(observed: ObservedAttention) -> ObservedAttention:
    """Cast queries, keys and values to the autocast dtype, as the kernel does."""
    device = observed.q.device.type
    if not torch.is_autocast_enabled(device) or observed.q.dtype == torch.float64:
        return observed
    dtype = torch.get_autocast_dtype(device)
    return observed._replace(q=observed.q.to(dtype), k=observed.k.to(dtype), v=observed.v.to(dtype))


def _keep_gradient(record: Record, out: Tensor, heads: Callable[[Tensor], Tensor]) -> None:
    """Register a hook that keeps the gradient of an attention's output."""
    if not out.requires_grad:
        raise ValueError(
            "gradients=True needs a forward pass with gradients, but the output of "
            f"{shown_name(record.name)!r} does not require any; run the model without torch.no_grad(), on inputs or "
            "parameters that require gradients, and pass use_reentrant=False to activation checkpointing"
        )

    def keep(grad: Tensor) -> None:
        record.add_gradient(heads(grad.detach()))

    out.register_hook(keep)
