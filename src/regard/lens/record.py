"""Record: what is kept of one layer's attention, growing row by row while a model writes.

A layer that is called again with the keys it had, and the next ones behind them, goes on with the same matrix: its new
queries are new rows, its new keys new columns. Keys are known by a checksum, so it does not matter whether a cache
copies them, writes them in place, forgets old ones or moves its batch rows about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.biases import Bias
from ..ops.call import Call
from ..ops.lazy import Weights
from ..ops.mask import Mask
from ..ops.normalizers import Normalizer, Softmax
from ..ops.operator import weights
from ..ops.scores import Dot, Score
from .steps import Matrix, Memo, Step, Terms, joined, looks_back_only, moved
from .storage import Held, Kept, Store


@dataclass(frozen=True, eq=False, kw_only=True)
class Seen:
    """One attention as a model called it: dims as everywhere, terms in the slots they fill."""

    q: Tensor  # b h i d
    k: Tensor  # b g j d
    v: Tensor  # b g j e
    score: Score | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    normalize: Normalizer | None = None
    offset: int | None = None  # where the first query stands among these keys
    statistic: Tensor | None = None  # b h i, if the kernel told

    @property
    def place(self) -> int:
        """The position of the first query."""
        return self.k.shape[2] - self.q.shape[2] if self.offset is None else self.offset


@dataclass(frozen=True, eq=False)
class Extras:
    """What value norms and gradient x attention need beyond the weights; None where it was not kept."""

    v: Tensor | None = None  # b g j e
    projection: Tensor | None = None  # dim (h e): what maps the heads side by side to the layer's output
    gradient: Tensor | None = None  # b h i e: of the heads' output


class Record:
    """The attention of one layer over one text, and its row of a tape."""

    def __init__(self, name: str, seen: Seen, store: Store, *, heads: list[int] | None, values: bool) -> None:
        self.name = name
        self.heads, self.of_heads = heads, seen.q.shape[1]
        self.width = self.of_heads * seen.v.shape[3]  # of all heads side by side
        self.score, self.normalize = seen.score, seen.normalize
        self.store = store
        self.values = values
        self.dtype = torch.promote_types(seen.q.dtype, torch.float32)
        self._projection: Held | None = None
        self._gradient: Tensor | None = None
        i, j = seen.q.shape[2], seen.k.shape[2]
        self.batch, self.keys = seen.q.shape[0], j
        # A decoder that asks another sequence step by step hands over the same memory: held, so that it stays its own.
        self.handed = seen.k if i == 1 or (i != j and store.in_place and not looks_back_only(seen.mask)) else None
        self.steps: list[Step] = []
        self._parts: dict[str, list[Kept]] = {"q": [], "k": [], "v": [], "statistic": []}
        # Keys that are kept as they are can be told apart when somebody asks; most are never asked about.
        self._prints = None if store.in_place and heads is None else checksums(seen.k)
        self._given = seen.offset
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

    def follow(self, seen: Seen, lineage: list[int] | None) -> list[int] | None:
        """Take a later call in if it goes on where this ends; then which batch row each of its rows was, else None.

        `lineage` says so of the layers before it, if the pass it is part of goes on with an earlier one.
        """
        prints, i, j, total = checksums(seen.k), seen.q.shape[2], seen.k.shape[2], self.keys
        parents = self._same_keys(seen.k, prints, lineage)
        if parents is not None:
            self._move(parents)
            self._add(seen, past=j, first=0)
            return parents
        for past in dict.fromkeys((seen.place, total)):
            if not 0 < past <= min(total, j - i):
                continue
            parents = _parents(prints[:, :past], self.prints[:, total - past :])
            if parents is not None:
                self._move(parents)
                self._prints = torch.cat((self.prints, prints[:, past : past + i]), 1)
                self._add(replace(seen, offset=past), past=past, first=total - past)
                self.keys = total + i
                self.handed = None
                return parents
        return None

    def weights(self, memo: Memo) -> Weights:
        """The matrix of all rows so far; `memo` shares what layers have in common."""
        q, k = self._whole("q"), self._whole("k")
        mask, bias, offset = self.terms(q.device, memo)
        score, normalize = moved(self.score, q.device), moved(self.normalize, q.device)
        terms: Any = {"score": score, "mask": mask, "bias": bias, "normalize": normalize, "offset": offset}
        A = weights(q, k, **terms) if self.heads is None else chosen_heads(q, k, self.heads, **terms)
        if not self._parts["statistic"]:
            return A
        statistic = self._whole("statistic")
        told_of_all = statistic.shape[2] == self.rows  # not every step's kernel may have told
        return Weights(A.call, statistic[..., None]) if told_of_all else A

    def extras(self) -> Extras:
        """What was kept beside the weights."""
        v = self._whole("v") if self._parts["v"] else None
        projection = None if self._projection is None else self._projection.get()
        if projection is not None and self.heads is not None:
            projection = projection.unflatten(1, (self.of_heads, -1))[:, self.heads].flatten(1)
        return Extras(v, projection, self._gradient)

    def project(self, weight: Tensor) -> None:
        """Note the output projection."""
        self._projection = Held(weight)

    def descend(self, gradient: Tensor) -> None:
        """Note the gradient of the heads' output."""
        self._gradient = gradient if self.heads is None else gradient[:, self.heads]

    def terms(self, device: torch.device, memo: Memo) -> Terms:
        """The mask, the bias and the first position of all rows together."""
        known = device, *(step.known_as() for step in self.steps)
        if known not in memo:
            # The steps are kept with what they came to: they are known by the ids of their terms.
            memo[known] = tuple(self.steps), joined(self.steps, self._matrix(device), given=self._given)
        return memo[known][1]

    def close(self) -> None:
        """Nothing will be added: let go of what only served to follow the model, and join the parts."""
        self.handed = None
        for name, parts in self._parts.items():
            if len(parts) > 1:
                whole = self._whole(name)
                for part in parts:
                    self.store.drop(part)
                self._parts[name] = [self.store.put(whole, f"{self.name}: {name}")]

    def forget(self) -> None:
        """Give everything back."""
        for parts in self._parts.values():
            while parts:
                self.store.drop(parts.pop())

    def _same_keys(self, k: Tensor, prints: Tensor, lineage: list[int] | None) -> list[int] | None:
        """Where the batch rows were, if these are the keys of another sequence that is attended to step by step."""
        parents = lineage
        if parents is None and self.handed is not None and _same_memory(self.handed, k):
            parents = list(range(len(prints)))
        if parents is None or len(parents) != len(prints) or max(parents, default=-1) >= self.batch:
            return None
        return parents if torch.equal(self.prints[parents], prints) else None

    def _add(self, seen: Seen, *, past: int, first: int) -> None:
        i, j = seen.q.shape[2], seen.k.shape[2]
        new = slice(past, past + i) if past and past < j else slice(past, j)
        kept = {"q": seen.q, "k": seen.k if new == slice(0, j) else seen.k[:, :, new]}
        if self.values:
            kept["v"] = seen.v[:, :, new]
        if seen.statistic is not None:
            kept["statistic"] = seen.statistic
        if self.heads is not None:
            shared = [head * seen.k.shape[1] // self.of_heads for head in self.heads]
            kept = {name: x[:, shared if name in ("k", "v") else self.heads] for name, x in kept.items()}
        for name, x in kept.items():
            if x.shape[2] or not self._parts[name]:
                self._parts[name].append(self.store.put(x, f"{self.name}: {name}"))
        keys = past + i if past and past < j else j
        self.steps.append(Step(i, keys, first, seen.mask, seen.bias, seen.place))

    def _move(self, parents: list[int]) -> None:
        """Let the batch rows be these of what they were."""
        if parents == list(range(self.batch)):
            return
        self._prints, self.batch = self.prints[parents], len(parents)
        self.steps = [step.moved(parents) for step in self.steps]
        for name, parts in self._parts.items():
            moved = [part.get()[parents] for part in parts]
            for part in parts:
                self.store.drop(part)
            self._parts[name] = [self.store.put(x, f"{self.name}: {name}") for x in moved]

    def _matrix(self, device: torch.device) -> Matrix:
        return Matrix(self.batch, self.of_heads, self.rows, self.keys, device, self.dtype)

    def _whole(self, name: str) -> Tensor:
        parts = [part.get() for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def chosen_heads(
    q: Tensor,
    k: Tensor,
    heads: list[int],
    *,
    score: Score | None,
    mask: Mask | None,
    bias: Bias | None,
    normalize: Normalizer | None,
    offset: int | None,
) -> Weights:
    """The weights of some heads, whose q and k these are, under terms that number all heads there were."""
    call = Call(
        q,
        k,
        None,
        score=score or Dot(),
        mask=mask,
        bias=bias,
        normalize=normalize or Softmax(),
        dropout=0.0,
        offset=k.shape[2] - q.shape[2] if offset is None else offset,
        lead=(q.shape[0],),
        head_ids=torch.tensor(heads, device=q.device),
    )
    return Weights(call)


def checksums(k: Tensor) -> Tensor:
    """A number for each key that tells it from others, exact to the bit and the same wherever it is stored: `b j`."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[k.dtype.itemsize]
    return k.detach().view(ints).sum((1, 3), dtype=torch.int64)


def _parents(prints: Tensor, before: Tensor) -> list[int] | None:
    """For each batch row, the row of `before` with the same keys; None unless all have one."""
    if prints.shape == before.shape and torch.equal(prints, before):
        return list(range(len(prints)))
    same = (prints[:, None] == before).all(-1)
    return same.to(torch.uint8).argmax(1).tolist() if bool(same.any(1).all()) else None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
