"""Record: what is kept of one layer's attention, growing row by row while a model writes.

A layer that is called again with the keys it had, and the next ones behind them, goes on with the same matrix: its new
queries are new rows, its new keys new columns. Keys are known by a checksum, so it does not matter whether a cache
copies them, writes them in place, forgets old ones or moves its batch rows about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.weights import Weights
from ..interception.sdpa import holds
from ..layer_names import shown_name
from .generation import Matrix, Memo, Step, Terms, joined, looks_back_only, moved
from .observed import ObservedAttention, weights_of_observed
from .store import KeptTensor, Store, TensorInMemory


@dataclass(frozen=True, eq=False)
class Extras:
    """What value norms and gradient x attention need beyond the weights; None where it was not kept."""

    v: Tensor | None = None  # b g j e
    projection: Tensor | None = None  # dim (h e): what maps the heads side by side to the layer's output
    gradient: Tensor | None = None  # b h i e: of the heads' output


class Record:
    """The attention of one layer over one text, and its row of a tape."""

    def __init__(
        self, name: str, seen: ObservedAttention, store: Store, *, heads: list[int] | None, values: bool
    ) -> None:
        self.name, self.store, self.heads, self.values = name, store, heads, values
        self.score, self.normalize = seen.score, seen.normalize
        self.batch, self.of_heads, i, _ = seen.q.shape
        self.keys = j = seen.k.shape[2]
        self._projection: KeptTensor | None = None
        self._gradient: Tensor | None = None
        # A decoder that asks another sequence step by step hands over the same memory: held, so that it stays its own.
        self.handed = seen.k if i == 1 or (i != j and store.in_place and not looks_back_only(seen.mask)) else None
        self._written = None if seen.k.is_inference() else seen.k._version  # how often, when they were handed over
        self.steps: list[Step] = []
        self._parts: dict[str, list[KeptTensor]] = {}  # of q, k and, where they are kept, v and statistic
        # Keys that are kept as they are can be told apart when somebody asks; most are never asked about.
        self._prints = None if store.in_place and heads is None else checksums(seen.k)
        self._given = seen.offset
        self._texts = torch.eye(self.batch, dtype=torch.bool)  # which of its first rows each batch row may go on with
        self.ended = torch.zeros(self.batch, dtype=torch.bool)  # which of them a search has gone on without
        self._add(seen, past=0, first=0)

    @property
    def rows(self) -> int:
        """How many queries there are so far."""
        return sum(step.rows for step in self.steps)

    @property
    def prints(self) -> Tensor:
        """What tells the keys so far from others: `b j`."""
        if self._prints is None:
            self._prints = checksums(self._whole("k"))
        return self._prints

    def follow(self, seen: ObservedAttention, lineage: Tensor | None) -> Tensor | None:
        """Take a later call in if it goes on where this ends; else None.

        Then it returns which of the batch rows before each of its rows may have been, `b before`: one, or several with
        the same keys. `lineage` says so of the layer before it, if the pass it is part of goes on with an earlier one.
        """
        prints, i, j, total = checksums(seen.k), seen.q.shape[2], seen.k.shape[2], self.keys
        parents = self._same_keys(seen, prints, lineage)
        if parents is not None:
            self._move(parents)
            self._add(seen, past=j, first=0)
            return parents
        for past in dict.fromkeys((seen.first_position, total)):
            if not 0 < past <= min(total, j - i):
                continue
            parents = _parents(prints[:, :past], self.prints[:, total - past :])
            if parents is not None:
                self._move(parents)
                self._prints = torch.cat((self.prints, prints[:, past : past + i]), 1)
                self._add(seen._replace(offset=past), past=past, first=total - past)
                self.keys = total + i
                self.handed = None
                return parents
        return None

    def weights(self, memo: Memo) -> Weights:
        """The matrix of all rows so far; `memo` shares what layers have in common."""
        q, k = self._whole("q"), self._whole("k")
        mask, bias, offset = self._terms(q, memo)
        score, normalize = moved(self.score, q.device), moved(self.normalize, q.device)
        terms: Any = {"score": score, "mask": mask, "bias": bias, "normalize": normalize, "offset": offset}
        statistic = self._whole("statistic") if "statistic" in self._parts else None
        if statistic is not None and (statistic.shape[2] != self.rows or not holds(q, k)):
            statistic = None  # not every step's kernel told, or not the truth
        return weights_of_observed(q, k, self.heads, **terms, statistic=statistic)

    def extras(self) -> Extras:
        """What was kept beside the weights."""
        v = self._whole("v") if self.values else None
        projection = None if self._projection is None else self._projection.get()
        if projection is not None and self.heads is not None:
            projection = projection.unflatten(1, (self.of_heads, -1))[:, self.heads].flatten(1)
        return Extras(v, projection, self._gradient)

    def project(self, weight: Tensor) -> None:
        """Note the output projection."""
        if self.store.in_place:
            self._projection = TensorInMemory(weight)
        elif self._projection is None:
            self._projection = self.store.put(weight, f"{shown_name(self.name)}: projection")

    def descend(self, gradient: Tensor) -> None:
        """Note the gradient of the heads' output."""
        self._gradient = gradient if self.heads is None else gradient[:, self.heads]

    def close(self) -> None:
        """Nothing will be added: let go of what only served to follow the model, and join the parts."""
        self.handed = None
        for name, parts in self._parts.items():
            if len(parts) > 1:
                whole = self._whole(name)
                for part in parts:
                    self.store.drop(part)
                self._parts[name] = [self.store.put(whole, f"{shown_name(self.name)}: {name}")]

    def forget(self) -> None:
        """Give everything back."""
        for parts in self._parts.values():
            while parts:
                self.store.drop(parts.pop())
        if self._projection is not None and not self.store.in_place:
            self.store.drop(self._projection)

    def _same_keys(self, seen: ObservedAttention, prints: Tensor, lineage: Tensor | None) -> Tensor | None:
        """Which rows these may have been, if the keys are of another sequence that is attended to step by step."""
        if lineage is None and seen.q.shape[2] == 1 and self._handed_again(seen.k, prints):
            return torch.eye(len(prints), dtype=torch.bool, device=prints.device)
        if lineage is None or lineage.shape != (len(prints), self.batch) or prints.shape[1] != self.keys:
            return None
        if self._is_read_again(seen):
            return None
        row, before = lineage.nonzero(as_tuple=True)
        parents = torch.zeros_like(lineage)
        parents[row, before] = (prints[row] == self.prints[before]).all(-1)
        return parents if bool(parents.any(1).all()) else None

    def _is_read_again(self, seen: ObservedAttention) -> bool:
        """Does a text that attends to itself come once more from its beginning, as that of an encoder does?"""
        if not self.steps[0].rows == seen.q.shape[2] == self.keys > 1:
            return False
        q = seen.q if self.heads is None else seen.q[:, self.heads]
        return torch.equal(self._parts["q"][0].get().to(q.device), q)

    def _handed_again(self, k: Tensor, prints: Tensor) -> bool:
        """Are these the keys it was handed, and nobody has written to them since?"""
        if self.handed is None or not _same_memory(self.handed, k):
            return False
        if not k.is_inference() and k._version == self._written:
            return True
        return self._written != 0 and torch.equal(prints, self.prints)  # else they were not copied, and are gone

    def _add(self, seen: ObservedAttention, *, past: int, first: int) -> None:
        i, j = seen.q.shape[2], seen.k.shape[2]
        keys = past + i if 0 < past < j else j
        new = slice(past, keys)
        whole = not past and keys == j
        kept = {"q": seen.q, "k": seen.k if whole else seen.k[:, :, new]}
        if self.values:
            kept["v"] = seen.v if whole else seen.v[:, :, new]
        if seen.statistic is not None:
            kept["statistic"] = seen.statistic
        if self.heads is not None:
            shared = [head * seen.k.shape[1] // self.of_heads for head in self.heads]
            kept = {name: x[:, shared if name in ("k", "v") else self.heads] for name, x in kept.items()}
        for name, x in kept.items():
            parts = self._parts.setdefault(name, [])
            if not parts or x.shape[2]:
                parts.append(self.store.put(x, f"{shown_name(self.name)}: {name}", seen.version))
        self.steps.append(Step(i, keys, first, seen.mask, seen.bias, j - i if seen.offset is None else seen.offset))

    def _move(self, parents: Tensor) -> None:
        """Let each batch row be the first of those it may have been."""
        rows = parents.to(torch.uint8).argmax(1).tolist()
        if rows == list(range(self.batch)):
            return
        texts = parents.cpu().float() @ self._texts.float() > 0
        if len(rows) < self.batch:  # else one of a beam has taken the place of another
            self.ended |= self._texts.any(0) & ~texts.any(0)
        self._prints, self.batch, self._texts = self.prints[rows], len(rows), texts
        self.steps = [step.moved(rows) for step in self.steps]
        for name, parts in self._parts.items():
            moved = [part.get()[rows] for part in parts]
            for part in parts:
                self.store.drop(part)
            self._parts[name] = [self.store.put(x, f"{shown_name(self.name)}: {name}") for x in moved]

    def _terms(self, q: Tensor, memo: Memo) -> Terms:
        """The mask, the bias and the first position of all rows together."""
        known = q.device, *(step.known_as() for step in self.steps)
        if known not in memo:
            # The steps are kept with what they came to: they are known by the ids of their terms.
            memo[known] = tuple(self.steps), joined(self.steps, self._matrix(q), given=self._given)
        return memo[known][1]

    def _matrix(self, q: Tensor) -> Matrix:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return Matrix(self.batch, self.of_heads, self.rows, self.keys, q.device, dtype)

    def _whole(self, name: str) -> Tensor:
        parts = [part.get() for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def checksums(k: Tensor) -> Tensor:
    """A number for each key that tells it from others, exact to the bit and the same wherever it is stored: `b j`."""
    return as_integers(k).sum((1, 3), dtype=torch.int64)


def as_integers(x: Tensor) -> Tensor:
    """The bits of each number as a whole number."""
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def _parents(prints: Tensor, before: Tensor) -> Tensor | None:
    """The rows of `before` with the same keys as each batch row, `b before`; None unless all have one."""
    if prints.shape == before.shape and torch.equal(prints, before):
        return torch.eye(len(prints), dtype=torch.bool, device=prints.device)
    same = (prints[:, None] == before).all(-1)
    return same if bool(same.any(1).all()) else None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
