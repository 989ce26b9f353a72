"""Cache of values derived from a term, such as the tiles that a mask leaves visible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .terms.term import Term

MAX_ENTRIES = 64  # per tensor, and for all terms without tensors together

V = TypeVar("V")


def cached_per_term(term: Term, key: Hashable, make: Callable[[], V]) -> V:
    """`make()`, or its cached value for this term and key.

    A term without tensors is looked up by value. A term with tensors is looked up by their identity, through weak
    references, so an equal term over the same tensors finds the entry too. After a tensor was changed in place the
    value is made anew: on the CPU, where NumPy and `.data` change memory without raising the version counter, the
    numbers themselves are compared; on other devices the version counters are.
    """
    tensors = term.tensors()
    if any(x.is_inference() for x in tensors):
        return make()  # they have no version counter
    key = (without_tensors(term), key)
    if not tensors:
        return _recall(_by_value, key, make)
    memory = _by_tensor.setdefault(tensors[0], OrderedDict())
    entry = memory.get(key)
    if entry is None or not all(map(_is_unchanged, entry[0], tensors)):
        memory[key] = entry = [(ref(x), x.detach().clone() if x.is_cpu else x._version) for x in tensors], make()
        memory.move_to_end(key)
        if len(memory) > MAX_ENTRIES:
            memory.popitem(last=False)
    value: V = entry[1]
    return value


_by_value: OrderedDict[Hashable, object] = OrderedDict()
_by_tensor = WeakTensorKeyDictionary()


def _is_unchanged(known: tuple[ref[Tensor], Tensor | int], x: Tensor) -> bool:
    tensor, state = known
    return tensor() is x and (torch.equal(state, x) if isinstance(state, Tensor) else state == x._version)


def _recall(memory: OrderedDict[Hashable, object], key: Hashable, make: Callable[[], V]) -> V:
    if key not in memory:
        memory[key] = make()
        if len(memory) > MAX_ENTRIES:
            memory.popitem(last=False)
    memory.move_to_end(key)
    value: V = memory[key]  # type: ignore[assignment]
    return value


def without_tensors(term: Term | None) -> Hashable:
    """A hashable key of a term without its tensors: equal for two terms that differ in tensors alone."""
    if term is None:
        return None
    values = (getattr(term, name) for name in term.__dataclass_fields__)
    return type(term), tuple(
        without_tensors(x) if isinstance(x, Term) else Tensor if isinstance(x, Tensor) else x for x in values
    )
