"""Provenance: which tensors come of products of queries and keys, whatever has been done to these since.

A softmax of scores that heads were mixed in, or that a convolution went over, is one of queries and keys still, and
where it leads nowhere that is understood somebody should say so. What was done is not looked at, but sizes are: a trace
goes on as long as there is a dim for the queries and one for the keys, and ends where a linear map takes one of them
for features, as of a classifier or a router of experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .matmul import MATMUL_NAMES, equation

FEATURES = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}  # the dims that these take for features
FACTORS = MATMUL_NAMES - {"einsum", "baddbmm"}

Pair = tuple[int, int]  # how many queries and keys, or keys and queries


class Provenance:
    """The tensors that come of products, as long as they live."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[weakref.ref[Tensor], Pair]] = {}

    def begin(self, x: Tensor) -> None:
        """Trace what comes of scores, *lead i j."""
        self._add(x, (x.shape[-2], x.shape[-1]))

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Take in a call, that has run, of any function but a softmax."""
        for n, x in enumerate((*args, *kwargs.values()) if kwargs else args):
            if type(x) in (list, tuple):
                x = next((y for y in x if id(y) in self.held), None)
            if id(x) in self.held and (pair := self._of(x)) is not None:
                if _spares(getattr(func, "__name__", ""), n, x, args, pair):
                    self._lead(x.shape, pair, args[0] if out is None else out)
                return

    def is_attention_softmax(self, x: Tensor, dim: int) -> bool:
        """Is a softmax of x over a dim one of queries and keys?"""
        pair = self._of(x)
        if pair is None or x.shape[dim] not in pair:
            return False
        rest = list(x.shape)
        keys = rest.pop(dim)
        return pair[pair[0] == keys] in rest

    def clear(self) -> None:
        """Forget all."""
        self.held.clear()

    def _of(self, x: Any) -> Pair | None:
        held = self.held.get(id(x))
        return held[1] if held is not None and held[0]() is x else None

    def _add(self, x: Tensor, pair: Pair) -> None:
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (held := self.held.get(key)) is not None and held[0] is ref:
                del self.held[key]

        self.held[key] = weakref.ref(x, forget), pair

    def _lead(self, before: Sequence[int], pair: Pair, out: Any) -> None:
        """Trace what a call made of a tensor: all of it that still has queries and keys."""
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, Tensor) and not x.is_nested and x.is_floating_point():
                after = pair if _holds(x.shape, pair) else _resized(before, x.shape, pair)
                if after is not None:
                    self._add(x, after)


def _spares(name: str, n: int, x: Tensor, args: Sequence[Any], pair: Pair) -> bool:
    """Does a function, as far as its name tells, sum over neither of them in x, its n-th argument?"""
    if name == "einsum":
        if (read := equation(args)) is None:
            return True
        *operands, out = read
        dims = next((dims for dims, y in operands if y is x), "")
        return _holds([size for label, size in zip(dims, x.shape, strict=False) if label in out], pair)
    dim = FEATURES.get(name, -1 - n if name in FACTORS else 0)
    return not dim or _holds([size for at, size in enumerate(x.shape, -x.ndim) if at != dim], pair)


def _holds(shape: Sequence[int], pair: Pair) -> bool:
    """Has a tensor a dim for each of them, or, where there are several, one for both?"""
    a, b = pair
    apart = list(shape).count(a) > 1 if a == b else a in shape and b in shape
    return apart or (min(pair) > 1 and a * b in shape)


def _resized(before: Sequence[int], after: Sequence[int], pair: Pair) -> Pair | None:
    """How many there are where keys were chosen, or others joined them."""
    changed = [(x, y) for x, y in zip(before, after, strict=False) if x != y]
    if len(before) != len(after) or len(changed) != 1:
        return None
    (was, now), (a, b) = changed[0], pair
    return None if was not in pair or now < 2 else (now, b) if was == a else (a, now)
