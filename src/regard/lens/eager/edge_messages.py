"""EdgeMessages: follow the weights of edges from their softmax to the messages that a graph layer sums.

    weights = softmax(logits, targets)                  # e h
    messages = dropout(weights)[..., None] * values     # e h d
    out = zeros.index_add(0, targets, messages)         # n h d

The tensor that multiplies the values holds the final weights. Messages that are more than this product, or that are not
summed, have other weights than those of the softmax.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interception.output_check import ROUNDING_UNITS
from .final_weights import describe
from .op_rules import is_in_place

PRODUCT_NAMES = frozenset(("mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__"))
DROPPED = "dropped out"  # how `describe` names dropout
TOLERANCE = 1e-4  # error of sums, relative to the sums of magnitudes


class FinalEdgeWeights(NamedTuple):
    """The numbers that multiply the values of edges, and what was done to them since the softmax."""

    weights: Tensor
    changes: tuple[str, ...]


class _Step(NamedTuple):
    """A tensor of weights of edges: what was done to it, and the weights before its last product."""

    changes: tuple[str, ...]
    factor: FinalEdgeWeights | None = None
    products: int = 0


class EdgeMessages:
    """The live tensors that hold the weights of edges, or their products with values."""

    def __init__(self, weights: Tensor) -> None:
        self._size = weights.numel()
        self._steps: dict[int, tuple[weakref.ref[Tensor], _Step]] = {}
        self._products: dict[int, tuple[weakref.ref[Tensor], FinalEdgeWeights]] = {}
        self._steps[id(weights)] = weakref.ref(weights), _Step(())

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Process a call that ran."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        name = getattr(func, "__name__", "")
        for x in (*args, *kwargs.values()):
            change = describe(name, args, kwargs)
            product = _value_of(self._products, x)
            if product is not None and not change and out.numel() == x.numel():
                self._products[id(out)] = weakref.ref(out), product
            step = _value_of(self._steps, x)
            if step is None:
                continue
            if out.numel() == self._size:
                changes = (*step.changes, change) if change else step.changes
                is_product = name in PRODUCT_NAMES
                before = step.factor
                if is_product:  # a gate, or values with one feature
                    before = FinalEdgeWeights(out.detach() if is_in_place(name) else x.detach(), step.changes)
                self._steps[id(out)] = weakref.ref(out), _Step(changes, before, step.products + is_product)
                return
            if name in PRODUCT_NAMES and out.numel() > self._size:
                self._products[id(out)] = weakref.ref(out), FinalEdgeWeights(x.detach(), step.changes)
                return

    def final_weights(self, messages: Any) -> FinalEdgeWeights | None:
        """Return the numbers that multiply the values of messages; None if the messages are no such product."""
        if (product := _value_of(self._products, messages)) is not None:
            return product
        step = _value_of(self._steps, messages)  # values with one feature
        return step.factor if step is not None and step.products == 1 else None


def sums_messages(messages: Tensor, targets: Tensor, dim: int, out: Tensor) -> bool:
    """Whether the output is the sum of the messages into each target, along a dim."""
    dim %= messages.ndim
    if out.ndim != messages.ndim or messages.shape[dim] != len(targets):
        return False
    found, given = (x.detach().double().movedim(dim, 0).flatten(1) for x in (out, messages))
    if found.shape[1] != given.shape[1] or (len(targets) and int(targets.max()) >= len(found)):
        return False
    sums, sizes = (torch.zeros_like(found).index_add(0, targets, x) for x in (given, given.abs()))
    tolerance = max(TOLERANCE, ROUNDING_UNITS * torch.finfo(out.dtype).eps)
    return bool(((sums - found).abs() <= tolerance * sizes).all())


def _value_of(known: Mapping[int, tuple[weakref.ref[Tensor], Any]], x: Any) -> Any:
    entry = known.get(id(x))
    return entry[1] if entry is not None and entry[0]() is x else None
