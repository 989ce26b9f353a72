"""Cache of values derived from a term, such as the tiles that a mask leaves visible."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .terms.term import Term
from .terms.user_function import UserFunction

MAX_ENTRIES = 64  # per tensor, and for all terms without tensors together
NUMBERS = frozenset((int, float, bool, type(None)))

V = TypeVar("V")


def cached_per_term(term: Term, key: Hashable, make: Callable[[], V]) -> V:
    """`make()`, or its cached value for this term and key.

    A term without tensors is looked up by value. A term with tensors is looked up by their identity, through weak
    references, so an equal term over the same tensors finds the entry too. After a tensor was changed in place the
    value is made anew: on the CPU, where NumPy and `.data` change memory without raising the version counter, the
    numbers themselves are compared; on other devices the version counters are.
    """
    recent = _recent.get((id(term), key))
    if recent is not None:
        value: V = recent[1]
        return value
    tensors = term.tensors()
    if any(x.is_inference() for x in tensors):
        return make()  # they have no version counter
    call, key = (id(term), key), (without_tensors(term), key)
    with _LOCK:
        memory = _by_tensor.setdefault(tensors[0], OrderedDict()) if tensors else _by_value
        known = memory.get(key)
        if known is not None:
            memory.move_to_end(key)
    if known is None or not all(map(_is_unchanged, known[0], tensors)):
        # Made without the lock: another thread may make the same value meanwhile.
        with torch.inference_mode(False):  # autograd cannot save a tensor made in inference mode
            known = [(ref(x), x.detach().clone() if x.is_cpu else x._version) for x in tensors], make()
        with _LOCK:
            memory[key] = known
            memory.move_to_end(key)
            if len(memory) > MAX_ENTRIES:
                memory.popitem(last=False)
    if not tensors:
        if len(_recent) >= MAX_ENTRIES:
            _recent.clear()
        _recent[call] = term, known[1]
    made: V = known[1]
    return made


# key -> states of the term's tensors, and the value
_Memory = OrderedDict[Hashable, tuple[list[tuple[ref[Tensor], Tensor | int]], Any]]
_by_value: _Memory = OrderedDict()
_by_tensor = WeakTensorKeyDictionary()
# Terms without tensors that were used last, by their ids, and the terms, so that an id stays theirs: to look at the
# fields of a term takes nearly as long as a small attention.
_recent: dict[tuple[int, Hashable], tuple[Term, Any]] = {}
_LOCK = threading.Lock()


def _is_unchanged(known: tuple[ref[Tensor], Tensor | int], x: Tensor) -> bool:
    tensor, state = known
    return tensor() is x and (torch.equal(state, x) if isinstance(state, Tensor) else state == x._version)


def without_tensors(term: Term | None) -> Hashable:
    """A hashable key of a term without its tensors: equal for two terms that differ in tensors alone."""
    if term is None:
        return None
    return type(term), tuple(_without_tensors(getattr(term, name)) for name in term.__dataclass_fields__)


def _without_tensors(value: Any) -> Hashable:
    match value:
        case Term():
            return without_tensors(value)
        case Tensor():
            return Tensor
        case tuple():  # a tuple of numbers, such as lengths, takes no call of Python for each
            return value if NUMBERS.issuperset(map(type, value)) else tuple(map(_without_tensors, value))
        case UserFunction():
            return value.code
        case _:
            known: Hashable = value
            return known
