"""Track which tensors descend from a product of queries and keys, whatever was done to it since.

A softmax over scores that were mixed across heads, or convolved, is still an attention; if capture cannot
interpret its result, it must warn. The operations are not interpreted, only the sizes are: a tensor is tracked as long
as it has a dim for the queries and one for the keys. Tracking ends where a linear map or a convolution takes one of
them as its features, as a classifier or a router of experts does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .matmul import PLAIN_NAMES, parse_einsum

FEATURE_DIMS = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}  # dim of the features in the input

Pair = tuple[int, int]  # numbers of queries and of keys, in either order


class Provenance:
    """The live tensors that descend from products of queries and keys, with their numbers of queries and keys."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[weakref.ref[Tensor], Pair]] = {}

    def begin(self, x: Tensor) -> None:
        """Track a tensor of scores, *lead i j."""
        self._add(x, (x.shape[-2], x.shape[-1]))

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Track the results of a call that ran, of any function but a softmax."""
        for n, x in enumerate((*args, *kwargs.values()) if kwargs else args):
            if type(x) in (list, tuple):
                x = next((y for y in x if id(y) in self.held), None)
            if id(x) in self.held and (pair := self.pair_of(x)) is not None:
                if keeps_queries_and_keys(getattr(func, "__name__", ""), n, x, args, pair):
                    self._track_results(x.shape, pair, args[0] if out is None else out)
                return

    def is_attention_softmax(self, x: Tensor, dim: int) -> bool:
        """Whether a softmax of x over this dim is one over keys, with the queries in another dim."""
        pair = self.pair_of(x)
        if pair is None or x.shape[dim] not in pair:
            return False
        other_sizes = list(x.shape)
        keys = other_sizes.pop(dim)
        return pair[pair[0] == keys] in other_sizes

    def holds(self, x: Any) -> bool:
        """Whether a tensor descends from a product of queries and keys."""
        return self.pair_of(x) is not None

    def follow_as(self, x: Tensor, same: Tensor) -> None:
        """Track a tensor as another one."""
        if (pair := self.pair_of(same)) is not None:
            self._add(x, pair)

    def clear(self) -> None:
        """Remove everything."""
        self.held.clear()

    def pair_of(self, x: Any) -> Pair | None:
        """Return the numbers of queries and of keys of a tensor; None if it is not tracked."""
        held = self.held.get(id(x))
        return held[1] if held is not None and held[0]() is x else None

    def _add(self, x: Tensor, pair: Pair) -> None:
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (held := self.held.get(key)) is not None and held[0] is ref:
                del self.held[key]

        self.held[key] = weakref.ref(x, forget), pair

    def _track_results(self, before: Sequence[int], pair: Pair, out: Any) -> None:
        """Track each result of a call on a tensor of shape `before` that still has queries and keys."""
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, Tensor) and not x.is_nested and x.is_floating_point():
                after = pair if has_pair(x.shape, pair) else pair_after_resize(before, x.shape, pair)
                if after is not None:
                    self._add(x, after)


def keeps_queries_and_keys(name: str, n: int, x: Tensor, args: Sequence[Any], pair: Pair) -> bool:
    """Whether a function, judged by its name, sums over neither dim in x, its n-th argument."""
    if name == "einsum":
        if (parsed := parse_einsum(args)) is None:
            return True
        *operands, out = parsed
        dims = next((dims for dims, y in operands if y is x), "")
        return has_pair([size for label, size in zip(dims, x.shape, strict=False) if label in out], pair)
    dim = FEATURE_DIMS.get(name, -1 - n if name in PLAIN_NAMES else 0)
    return not dim or has_pair([size for at, size in enumerate(x.shape, -x.ndim) if at != dim], pair)


def has_pair(shape: Sequence[int], pair: Pair) -> bool:
    """Whether a shape has a dim for queries and one for keys, or one dim for both flattened."""
    a, b = pair
    has_two_dims = list(shape).count(a) > 1 if a == b else a in shape and b in shape
    return has_two_dims or (min(pair) > 1 and a * b in shape)


def pair_after_resize(before: Sequence[int], after: Sequence[int], pair: Pair) -> Pair | None:
    """Return the pair after one dim changed its size, because keys were selected or added; None otherwise."""
    changed = [(x, y) for x, y in zip(before, after, strict=False) if x != y]
    if len(before) != len(after) or len(changed) != 1:
        return None
    (was, now), (a, b) = changed[0], pair
    return None if was not in pair or now < 2 else (now, b) if was == a else (a, now)
