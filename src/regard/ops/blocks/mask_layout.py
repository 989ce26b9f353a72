"""Layout: which tiles of a matrix a mask leaves, and which keys anyone sees; worked out once for each mask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..call import Call
from ..terms.mask_tiles import Grid
from ..terms.masks import Rule
from ..terms.masks.mask_algebra import Mask
from ..terms.term import Term

TILE = 128
ENTRIES = 2**24  # of a mask looked at one by one at a time
REMEMBERED = 64

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Layout:
    """The tiles of `TILE` x `TILE` entries, and the keys, that a mask leaves."""

    some: Tensor  # b|1 h|1 rows cols, some entry may be visible
    full: Tensor  # b|1 h|1 rows cols, every entry is
    seen: Tensor | None  # b|1 1 1 j, keys that some query sees; None where that is all of them, or not known


def layout(mask: Mask, call: Call) -> Layout:
    """The tiles and keys of a call that its mask leaves visible."""
    block = call.whole()
    some, full = mask.tiles(Grid(block, TILE, TILE))
    shape = -(-call.shape[2] // TILE), -(-call.shape[3] // TILE)
    some, full = (x.expand(*x.shape[:2], *shape).contiguous() for x in (some, full & some))
    # A rule may read what changes between calls, so what it shows must not be remembered.
    seen = None if _holds(mask, Rule) else _seen(mask, call)
    return Layout(some, full, None if seen is None or bool(seen.all()) else seen)


def _seen(mask: Mask, call: Call) -> Tensor:
    """Keys that some query of a batch row sees, `b|1 1 1 j`."""
    b, h, i, j = call.shape
    found = torch.zeros(1, 1, 1, j, dtype=torch.bool, device=call.q.device)
    rows = max(1, ENTRIES // (b * h * j))
    for start in range(0, i, rows):
        part = mask.over(replace(call.whole(), rows=slice(start, min(start + rows, i))))
        part = part[(None,) * (4 - part.ndim)]
        found = found | part.any(2, keepdim=True).any(1, keepdim=True)
        if part.shape[2] == 1:
            break  # the same for every query
    return found


def remembered(term: Term, key: Hashable, make: Callable[[], V]) -> V:
    """`make()`, or what it made before for this term and key.

    A term without tensors is known by its value. One with tensors is known by them, held weakly, so that a term made
    anew over the same tensors finds it too; a tensor changed in place since makes it anew. On the CPU, where NumPy and
    `.data` change memory without a word, numbers are compared; elsewhere PyTorch's count of changes is.
    """
    tensors = term.tensors()
    if any(x.is_inference() for x in tensors):
        return make()  # such tensors do not tell whether they have changed
    key = (skeleton(term), key)
    if not tensors:
        return _recalled(_by_value, key, make)
    memory = _by_tensor.setdefault(tensors[0], OrderedDict())
    entry = memory.get(key)
    if entry is None or not all(map(_unchanged, entry[0], tensors)):
        memory[key] = entry = [(ref(x), x.detach().clone() if x.is_cpu else x._version) for x in tensors], make()
        memory.move_to_end(key)
        if len(memory) > REMEMBERED:
            memory.popitem(last=False)
    value: V = entry[1]
    return value


_by_value: OrderedDict[Hashable, object] = OrderedDict()
_by_tensor = WeakTensorKeyDictionary()


def _unchanged(known: tuple[ref[Tensor], Tensor | int], x: Tensor) -> bool:
    tensor, state = known
    return tensor() is x and (torch.equal(state, x) if isinstance(state, Tensor) else state == x._version)


def _recalled(memory: OrderedDict[Hashable, object], key: Hashable, make: Callable[[], V]) -> V:
    if key not in memory:
        memory[key] = make()
        if len(memory) > REMEMBERED:
            memory.popitem(last=False)
    memory.move_to_end(key)
    value: V = memory[key]  # type: ignore[assignment]
    return value


def skeleton(term: Term | None) -> Hashable:
    """A term without its tensors: what two terms share that differ in tensors alone."""
    if term is None:
        return None
    values = (getattr(term, name) for name in term.__dataclass_fields__)
    return type(term), tuple(
        skeleton(x) if isinstance(x, Term) else Tensor if isinstance(x, Tensor) else x for x in values
    )


def _holds(mask: Term, kind: type[Mask]) -> bool:
    parts = (getattr(mask, name) for name in mask.__dataclass_fields__)
    return isinstance(mask, kind) or any(_holds(part, kind) for part in parts if isinstance(part, Term))
