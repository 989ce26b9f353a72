"""Copies of what terms hold, so that a tape keeps the masks and biases that were, whoever writes to them later."""

from __future__ import annotations

from operator import is_
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from ...ops.terms.term import Term
from .store import Store, version_of

TermT = TypeVar("TermT", bound=Term)


class Copies:
    """One copy of each tensor, and one term of each, for as long as it is not written to: layers share theirs.

    A store counts them, unless they are not kept.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._terms: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._tensors = WeakTensorKeyDictionary()

    def of(self, term: TermT) -> TermT:
        """The term over tensors of our own, without gradients."""
        own = term.map_tensors(self._copy)
        if own is term:  # it holds none
            return term
        known: TermT | None = self._terms.get(term)
        if known is not None and all(map(is_, known.tensors(), own.tensors())):
            return known
        self._terms[term] = own
        return own

    def _copy(self, x: Tensor) -> Tensor:
        version, known = version_of(x), self._tensors.get(x)
        if known is not None:
            seen, copy = known
            if torch.equal(copy, x) if version is None else seen == version:
                return copy
        with torch.inference_mode(False):
            copy = x.detach().clone()
        if self._store is not None:
            self._store.charge(copy.nbytes, "a tensor of a mask, bias, score or normalizer", copy)
        self._tensors[x] = version, copy
        return copy
