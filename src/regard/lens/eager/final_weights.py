"""Follow attention weights through any function that a model applies after the softmax, up to the product with values.

What
    Rules (`op_rules.py`) follow the functions that leave weights as they are. All others, such as mixing heads, gates,
    stacking and renormalizing, are followed here by the sizes of queries and keys alone, as `Provenance` does for
    scores. The tensor that multiplies the values is then recorded as it is: the final weights.

Lifetimes
    Tensors are referenced weakly. `FinalWeights` drops what descends from a softmax once its weights were recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .provenance import Pair, has_pair, keeps_queries_and_keys, pair_after_resize

# Functions that move weights without a change of any number.
LAYOUT_NAMES = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "swapaxes"),
        *("swapdims", "permute", "movedim", "moveaxis", "mT", "T", "t", "__getitem__", "select", "narrow"),
        *("chunk", "split", "unbind", "contiguous", "clone", "to", "float", "double", "half", "bfloat16"),
        *("type", "type_as", "expand", "expand_as", "detach", "view_as", "reshape_as", "tensor_split"),
    )
)
CREATING_NAMES = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros"),
        *("new_ones", "new_full", "new_empty"),
    )
)
JOINING_NAMES = frozenset(("cat", "concat", "concatenate"))
DESCRIPTIONS = {
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide", "__imul__"), "scaled"),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract", "__iadd__", "__isub__"), "added to"),
    **dict.fromkeys(("masked_fill", "masked_fill_", "where", "index_fill", "index_fill_"), "masked"),
    **dict.fromkeys(("clamp", "clamp_", "clamp_min", "clamp_max", "clip", "maximum", "minimum"), "clamped"),
    **dict.fromkeys(("einsum", "linear", "matmul", "__matmul__", "bmm", "mm", "tensordot"), "heads mixed"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "heads mixed"),
    "mean": "averaged over heads",
    "sum": "summed over heads",
    **dict.fromkeys(("stack", "cat", "concat", "concatenate", "__setitem__", "copy_"), "joined"),
    **dict.fromkeys(("normalize", "batch_norm", "layer_norm", "instance_norm", "group_norm"), "normalized"),
    "gumbel_softmax": "drawn at random",
}


class Descent(NamedTuple):
    """The origin of a tensor of weights: one softmax or several, and what was done since."""

    pair: Pair  # numbers of queries and keys
    averaged: tuple[list[bool], ...]  # one list for each softmax, not empty once values were multiplied
    changes: tuple[str, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True once the weights of each softmax were recorded."""
        return all(self.averaged)


class FinalWeights:
    """The live tensors that descend from a softmax over the scores of queries and keys."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[weakref.ref[Tensor], Descent]] = {}

    def get(self, x: Any) -> Descent | None:
        """Return the origin of a tensor; None if it descends from no softmax whose weights are still to be used."""
        held = self.held.get(id(x))
        return held[1] if held is not None and held[0]() is x and not held[1].is_recorded else None

    def add(self, x: Tensor, descent: Descent) -> None:
        """Track a tensor of weights."""
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (held := self.held.get(key)) is not None and held[0] is ref:
                del self.held[key]

        self.held[key] = weakref.ref(x, forget), descent

    def follow(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        descent_of: Callable[[Tensor], Descent | None],
    ) -> None:
        """Track the results of a call that ran; `descent_of` returns the origin of an argument that is weights."""
        if name in CREATING_NAMES:
            return
        sources = [
            (x, descent)
            for n, x in _tensors((*args, *kwargs.values()))
            if (descent := descent_of(x)) is not None and keeps_queries_and_keys(name, n, x, args, descent.pair)
        ]
        if not sources:
            return
        x, first = sources[0]
        averaged = {id(each): each for _, descent in sources for each in descent.averaged}
        changes = dict.fromkeys(change for _, descent in sources for change in descent.changes)
        changes |= dict.fromkeys(filter(None, (describe(name, args, kwargs),)))
        for _, result in _tensors((args[0] if out is None else out,)):
            if result.is_nested or not result.is_floating_point():
                continue
            pair = _pair_of_result(name, args, kwargs, x, result, first.pair)
            if pair is not None:
                self.add(result, Descent(pair, tuple(averaged.values()), tuple(changes)))
                if result is not x:
                    self.add(x, first)  # a write to the result may change it, if the result is a view

    def forget_recorded(self) -> None:
        """Drop all tensors whose weights were recorded."""
        for key, (_, descent) in list(self.held.items()):
            if descent.is_recorded:
                self.held.pop(key, None)

    def clear(self) -> None:
        """Drop all."""
        self.held.clear()


def describe(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what a function does to weights in a word or two; "" if it changes no number."""
    if "dropout" in name:
        return "dropped out" if is_active_dropout(args, kwargs) else ""
    return "" if name in LAYOUT_NAMES else DESCRIPTIONS.get(name, name.strip("_"))


def is_active_dropout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of dropout changes its input."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return bool(p and (args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))))


def _pair_of_result(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor, result: Tensor, pair: Pair
) -> Pair | None:
    """Return the numbers of queries and keys of a result of x; None if it has no dims for both."""
    if name in JOINING_NAMES:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        if dim % result.ndim >= result.ndim - 2:  # keys, or queries, of several softmaxes
            pair = pair_after_resize(x.shape, result.shape, pair) or pair
    return pair if has_pair(result.shape, pair) else pair_after_resize(x.shape, result.shape, pair)


def is_over_keys(x: Tensor, behind: int, pair: Pair, v: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a product of weights x sums over their queries or keys, and not over heads.

    It sums over the dim with `behind` dims behind it, and v, `*lead j e`, is the other factor. If heads have the number
    of queries or keys too, a matrix without batch dims is taken for a map over heads.
    """
    if x.shape[-1 - behind] not in pair:
        return False
    rest = list(x.shape)
    keys = rest.pop(-1 - behind)
    if pair[pair[0] == keys] not in rest:
        return False
    is_ambiguous = list(x.shape).count(keys) > list(pair).count(keys)
    return not (is_ambiguous and x.ndim > 2 and all(y.ndim == 2 for y in others))


def _tensors(values: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield each tensor among values, or in a list among them, with the index of the value."""
    for n, x in enumerate(values):
        for y in x if isinstance(x, (list, tuple)) else (x,):
            if isinstance(y, Tensor):
                yield n, y
