"""Record: the attention of one layer, which grows row by row while the model generates.

What it holds
    Queries, keys and terms of one (layer, call) in a `Store`, and on request values, output projection and
    gradient. `weights` builds the lazy matrix of all rows so far.

How it grows
    A later call of the layer continues the record if its first keys are the keys of the record: its queries are new
    rows and its new keys new columns (`follow`). Keys are compared by checksum, so it does not matter whether a cache
    copies its keys, writes them in place, drops the oldest or reorders the batch rows, as beam search does. A decoder
    whose cross-attention reads the same keys at every step adds rows only.

Lifetimes
    While the capture is open the record holds the tensor of keys that the model passed, to recognize it in the next
    call. `close` releases that tensor and joins the parts of each kept tensor into one; `release` frees everything,
    for a record that a longer pass over the same text replaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.checksums import as_integers
from ...ops.weights import Weights
from ..interception.sdpa import lse_is_reliable
from ..layer_names import shown_name
from ..terms.changed_weights import holds_for_all_rows
from .generation import GenerationStep, JoinedMatrix, Memo, Terms, equal_terms, join_steps, looks_back_only, to_device
from .observed import ObservedAttention, weights_of_observed
from .store import KeptTensor, Store, TensorInMemory, version_of


@dataclass(frozen=True, eq=False)
class Extras:
    """Tensors that value norms and gradient x attention need beside the weights; None for each that was not kept."""

    v: Tensor | None = None  # b g j e
    projection: Tensor | None = None  # dim (h e): weight of the projection from concatenated heads to the output
    gradient: Tensor | None = None  # b h i e: gradient of the heads' output


class Record:
    """The attention of one layer over one text: one entry of a tape."""

    def __init__(
        self, name: str, observed: ObservedAttention, store: Store, *, heads: list[int] | None, values: bool
    ) -> None:
        self.name, self.store, self.heads, self.values = name, store, heads, values
        self.score, self.normalize = observed.score, observed.normalize
        self.batch, self.layer_heads, i, _ = observed.q.shape
        self.keys = j = observed.k.shape[2]
        self._projection: KeptTensor | None = None
        self._gradient: Tensor | None = None
        # A decoder's cross-attention passes the same memory at every step. Holding the tensor keeps its address unique.
        is_stepwise = i == 1 or (i != j and store.in_place and not looks_back_only(observed.mask))
        self._passed_keys = observed.k if is_stepwise else None
        self._passed_version = version_of(observed.k)
        self.steps: list[GenerationStep] = []
        self._parts: dict[str, list[KeptTensor]] = {}  # q, k, and if kept v and statistic, one part per step
        # Keys that stay in place can be summed later, when the layer is called again; most layers are not.
        self._checksums = None if store.in_place and heads is None else checksums(observed.k)
        self._first_offset = observed.offset
        # `batch first`: the rows of the first call that each batch row may continue.
        self._ancestors: Tensor | None = None  # None: each row continues itself
        self.ended: Tensor | None = None  # rows of the first call that left the batch; None: no row did
        self._add(observed, past=0, first=0)

    @property
    def rows(self) -> int:
        """The number of queries so far."""
        return sum(step.rows for step in self.steps)

    @property
    def has_statistic(self) -> bool:
        """Whether a call came with its row statistic."""
        return "statistic" in self._parts

    @property
    def checksums(self) -> Tensor:
        """The checksums of the keys so far: `b j`."""
        if self._checksums is None:
            self._checksums = checksums(self._whole("k"))
        return self._checksums

    def follow(self, observed: ObservedAttention, lineage: Tensor | None) -> Tensor | None:
        """Add a later call if it continues this record, and return the parents of its batch rows; else None.

        The parents are `b before`: True for each earlier batch row that a row may continue, which is several if they
        have the same keys. `lineage` are the parents that an earlier layer of the same pass found, None if that pass
        does not continue an earlier one.
        """
        if not (holds_for_all_rows(observed.normalize) and equal_terms(observed.normalize, self.normalize)):
            return None
        sums, i, j, total = checksums(observed.k), observed.q.shape[2], observed.k.shape[2], self.keys
        parents = self._parents_in_cross_attention(observed, sums, lineage)
        if parents is not None:
            self._reorder(parents)
            self._add(observed, past=j, first=0)
            return parents
        for past in dict.fromkeys((observed.first_position, total)):
            if not 0 < past <= min(total, j - i):
                continue
            parents = _parents(sums[:, :past], self.checksums[:, total - past :])
            if parents is not None:
                self._reorder(parents)
                self._checksums = torch.cat((self.checksums, sums[:, past : past + i]), 1)
                self._add(observed._replace(offset=past), past=past, first=total - past)
                self.keys = total + i
                self._passed_keys = None
                return parents
        return None

    def weights(self, memo: Memo) -> Weights:
        """Return the matrix of all rows so far; `memo` caches the joined terms for layers that share them."""
        q, k = self._whole("q"), self._whole("k")
        mask, bias, offset = self._terms(q, memo)
        score, normalize = to_device(self.score, q.device), to_device(self.normalize, q.device)
        terms: Any = {"score": score, "mask": mask, "bias": bias, "normalize": normalize, "offset": offset}
        statistic = self._whole("statistic") if "statistic" in self._parts else None
        # Some steps' kernels may not have returned it, and some kernels return a wrong one for NaN and Inf.
        if statistic is not None and (statistic.shape[2] != self.rows or not lse_is_reliable(q, k)):
            statistic = None
        return weights_of_observed(q, k, self.heads, **terms, statistic=statistic)

    def extras(self) -> Extras:
        """Return the values, output projection and gradient that were kept."""
        v = self._whole("v") if self.values else None
        projection = None if self._projection is None else self._projection.get()
        if projection is not None and self.heads is not None:
            projection = projection.unflatten(1, (self.layer_heads, -1))[:, self.heads].flatten(1)
        return Extras(v, projection, self._gradient)

    def add_projection(self, weight: Tensor) -> None:
        """Keep the weight of the output projection."""
        if self.store.in_place:
            self._projection = TensorInMemory(weight)
        elif self._projection is None:
            self._projection = self.store.put(weight, f"{shown_name(self.name)}: projection")

    def add_gradient(self, gradient: Tensor) -> None:
        """Keep the gradient of the heads' output."""
        self._gradient = gradient if self.heads is None else gradient[:, self.heads]

    def close(self) -> None:
        """Release what only serves to recognize later calls, and join the parts of each tensor."""
        self._passed_keys = None
        for name, parts in self._parts.items():
            if len(parts) > 1:
                whole = self._whole(name)
                for part in parts:
                    self.store.drop(part)
                self._parts[name] = [self.store.put(whole, f"{shown_name(self.name)}: {name}")]

    def release(self) -> None:
        """Release all tensors."""
        for parts in self._parts.values():
            while parts:
                self.store.drop(parts.pop())
        if self._projection is not None and not self.store.in_place:
            self.store.drop(self._projection)

    def _parents_in_cross_attention(
        self, observed: ObservedAttention, sums: Tensor, lineage: Tensor | None
    ) -> Tensor | None:
        """Return the parents of a call whose keys are the same as before, as in a decoder's cross-attention."""
        if lineage is None and observed.q.shape[2] == 1 and self._has_same_keys(observed.k, sums):
            return torch.eye(len(sums), dtype=torch.bool, device=sums.device)
        if lineage is None or lineage.shape != (len(sums), self.batch) or sums.shape[1] != self.keys:
            return None
        if self._is_repeated(observed):
            return None
        row, before = lineage.nonzero(as_tuple=True)
        parents = torch.zeros_like(lineage)
        parents[row, before] = (sums[row] == self.checksums[before]).all(-1)
        return parents if bool(parents.any(1).all()) else None

    def _is_repeated(self, observed: ObservedAttention) -> bool:
        """Whether the same self-attention runs again from its first token, as when an encoder is called twice."""
        if not self.steps[0].rows == observed.q.shape[2] == self.keys > 1:
            return False
        q = observed.q if self.heads is None else observed.q[:, self.heads]
        return torch.equal(self._parts["q"][0].get().to(q.device), q)

    def _has_same_keys(self, k: Tensor, sums: Tensor) -> bool:
        """Whether k is the tensor that an earlier call passed, with the same values; `sums` are the checksums of k."""
        if self._passed_keys is None or not _same_memory(self._passed_keys, k):
            return False
        if not k.is_inference() and k._version == self._passed_version:
            return True
        # At version 0 the keys were kept in place without a copy: a write has changed them, and the old ones are gone.
        return self._passed_version != 0 and torch.equal(sums, self.checksums)

    def _add(self, observed: ObservedAttention, *, past: int, first: int) -> None:
        """Keep the rows of a call, and its keys after the `past` keys that the record has."""
        i, j = observed.q.shape[2], observed.k.shape[2]
        keys = past + i if 0 < past < j else j
        new = slice(past, keys)
        all_new = not past and keys == j
        tensors = {"q": observed.q, "k": observed.k if all_new else observed.k[:, :, new]}
        if self.values:
            tensors["v"] = observed.v if all_new else observed.v[:, :, new]
        if observed.statistic is not None:
            tensors["statistic"] = observed.statistic
        if self.heads is not None:
            kv_heads = [head * observed.k.shape[1] // self.layer_heads for head in self.heads]
            tensors = {name: x[:, kv_heads if name in ("k", "v") else self.heads] for name, x in tensors.items()}
        for name, x in tensors.items():
            parts = self._parts.setdefault(name, [])
            if not parts or x.shape[2]:
                parts.append(self.store.put(x, f"{shown_name(self.name)}: {name}", observed.version))
        self.steps.append(GenerationStep(i, keys, first, observed.mask, observed.bias, observed.first_position))

    def _reorder(self, parents: Tensor) -> None:
        """Reorder the batch rows: each continues the first of its parents."""
        rows = parents.to(torch.uint8).argmax(1).tolist()
        if rows == list(range(self.batch)):
            return
        before = torch.eye(self.batch, dtype=torch.bool) if self._ancestors is None else self._ancestors
        ancestors = parents.cpu().float() @ before.float() > 0
        # In a batch of the same size a missing row was replaced by another hypothesis of the beam; it has not ended.
        if len(rows) < self.batch:
            lost = before.any(0) & ~ancestors.any(0)
            self.ended = lost if self.ended is None else self.ended | lost
        self._checksums, self.batch, self._ancestors = self.checksums[rows], len(rows), ancestors
        self.steps = [step.with_parents(rows) for step in self.steps]
        for name, parts in self._parts.items():
            reordered = [part.get()[rows] for part in parts]
            for part in parts:
                self.store.drop(part)
            self._parts[name] = [self.store.put(x, f"{shown_name(self.name)}: {name}") for x in reordered]

    def _terms(self, q: Tensor, memo: Memo) -> Terms:
        """Return the mask, the bias and the first position of all rows together."""
        key = q.device, *(step.identity() for step in self.steps)
        if key not in memo:
            # The key holds ids of terms: keeping the steps in the value keeps these ids unique.
            memo[key] = tuple(self.steps), join_steps(self.steps, self._matrix(q), offset=self._first_offset)
        return memo[key][1]

    def _matrix(self, q: Tensor) -> JoinedMatrix:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return JoinedMatrix(self.batch, self.layer_heads, self.rows, self.keys, q.device, dtype)

    def _whole(self, name: str) -> Tensor:
        parts = [part.get() for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def checksums(k: Tensor) -> Tensor:
    """Return a checksum of each key, `b j`: equal for bitwise equal keys, wherever they are stored."""
    return as_integers(k).sum((1, 3), dtype=torch.int64)


def _parents(sums: Tensor, before: Tensor) -> Tensor | None:
    """Return `b before`: which rows of `before` have the keys of each batch row; None if a row has no parent."""
    if sums.shape == before.shape and torch.equal(sums, before):
        return torch.eye(len(sums), dtype=torch.bool, device=sums.device)
    same = (sums[:, None] == before).all(-1)
    return same if bool(same.any(1).all()) else None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
