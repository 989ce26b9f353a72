"""Recognize deformable attention as models write it out: grid_sample of feature maps, then a weighted sum of points.

    points = [F.grid_sample(map, 2 * places - 1) for map, places in levels]     # (b h) d i p
    out = (torch.stack(points, -2).flatten(-2) * weights).sum(-1)               # (b h) d i

What
    `SampledPoints` follows the results of `F.grid_sample` through reshapes, permutes, stacks and concatenations by the
    origins of their dims: maps, channels, queries, points, levels. A product with weights, summed over the points,
    completes a `SampledAverage`, which `sampled_average.py` reads.

Lifetimes
    Tensors are referenced weakly; the feature maps are held as long as a tensor of their points lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dim_origins import Dim, DimOrigins, Factor, Origin
from .matmul import EINSUM_NAMES, MATMUL_NAMES, parse_contraction
from .sampled_average import CHANNELS, MAPS, POINTS, QUERIES, GridSample, SampledAverage, average_of

PRODUCT_NAMES = frozenset(("mul", "multiply", "__mul__", "__rmul__"))


class _Sampled(NamedTuple):
    """A tensor of sampled values: the calls that sampled them, and the origins of its dims."""

    calls: tuple[GridSample, ...]
    dims: tuple[Dim, ...]


class _Product(NamedTuple):
    """Sampled values times weights that broadcast to them."""

    sampled: _Sampled
    shape: torch.Size
    weights: Tensor

    @property
    def calls(self) -> tuple[GridSample, ...]:
        return self.sampled.calls


class SampledPoints:
    """The live tensors of sampled points, and their products with weights."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Tensor], _Sampled | _Product]] = {}
        self._origins = DimOrigins()

    @property
    def held(self) -> bool:
        """True while a tensor of sampled points lives."""
        return bool(self._values)

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> SampledAverage | None:
        """Process a call that ran; return the average that it completes."""
        if func is F.grid_sample:
            self._begin(GridSample.of(*args, **kwargs), out)
            return None
        name = getattr(func, "__name__", "")
        if name == "sum":
            return self._sum(args, kwargs, out)
        if name in MATMUL_NAMES:
            return self._contract(name, args, kwargs, out)
        if name in PRODUCT_NAMES:
            self._multiply(args, out)
        else:
            self._rearrange(func, args, kwargs, out)
        return None

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._origins.clear()

    def _begin(self, call: GridSample, out: Tensor) -> None:
        """Follow the points that a call sampled from maps with two dims of space."""
        if out.ndim == 4 and out.is_floating_point():
            dims = zip((MAPS, CHANNELS, QUERIES, POINTS), out.shape, strict=True)
            self._add(out, _Sampled((call,), tuple((Factor(kind, n),) if n > 1 else () for kind, n in dims)))

    def _rearrange(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Follow sampled values through a call: a reshape, a permute, a stack, a concatenation."""
        lists = (each if isinstance(each, (list, tuple)) else (each,) for each in (*args, *kwargs.values()))
        found = [value for given in lists for x in given if isinstance(value := self._get(x), _Sampled)]
        if not found or not isinstance(out, Tensor):
            return
        self._origins.follow(func, args, kwargs, out)
        if (origin := self._origins.get(out)) is not None:
            self._add(out, _Sampled(tuple(call for value in found for call in value.calls), origin.dims))

    def _multiply(self, args: Sequence[Any], out: Tensor) -> None:
        """Note a product of sampled values with weights."""
        for x, weights in (args, args[::-1]) if len(args) == 2 else ():
            sampled = self._get(x)
            if isinstance(sampled, _Sampled) and isinstance(weights, Tensor) and out.shape == x.shape:
                self._add(out, _Product(sampled, x.shape, weights))

    def _sum(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> SampledAverage | None:
        """Return the average that the sum of a product is."""
        product = self._get(args[0] if args else kwargs.get("input"))
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(product, _Product) or dims is None:
            return None
        n = len(product.shape)
        summed = {dim % n for dim in ([dims] if isinstance(dims, int) else dims)}
        return self._average(product, summed, out)

    def _contract(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor
    ) -> SampledAverage | None:
        """Return the average that a matrix product or an einsum of sampled values and weights is."""
        given = [each for x in args for each in (x if isinstance(x, (list, tuple)) else (x,))]
        if not any(isinstance(self._get(x), _Sampled) for x in given):
            return None
        if name in EINSUM_NAMES:
            *factors, labels = parse_contraction(name, args, kwargs) or ("",)
            for (own, x), (others, weights) in (factors, factors[::-1]) if len(factors) == 2 else ():
                sampled = self._get(x)
                if isinstance(sampled, _Sampled) and set(own) >= {*others, *labels}:
                    order = [label for label in own if label in others]
                    sizes = [x.shape[n] if label in others else 1 for n, label in enumerate(own)]
                    aligned = weights.permute([others.index(label) for label in order]).reshape(sizes)
                    summed = {n for n, label in enumerate(own) if label not in labels}
                    kept = out.permute([labels.index(label) for label in own if label in labels])
                    return self._average(_Product(sampled, x.shape, aligned), summed, kept)
            return None
        left, right = args if len(args) == 2 else (None, None)
        pairs: tuple[tuple[Any, Any, int], ...] = (left, right, -1), (right, left, -2)  # d p @ p 1, or 1 p @ p d
        for x, weights, at in pairs:
            sampled = self._get(x)
            if not isinstance(sampled, _Sampled) or not isinstance(weights, Tensor) or weights.ndim != x.ndim:
                continue
            if weights.shape[at] == 1 and out.shape[:-2] == x.shape[:-2]:
                return self._average(_Product(sampled, x.shape, weights.mT), {x.ndim + at}, out)
        return None

    def _average(self, product: _Product, summed: Collection[int], out: Tensor) -> SampledAverage | None:
        """Return the average over some dims of a product, and forget its points; None if it is none over points."""
        found = average_of(product.calls, product.sampled.dims, product.weights, summed, out.detach())
        if found is not None:
            ours = set(map(id, product.calls))
            done = [key for key, (_, value) in self._values.items() if ours & set(map(id, value.calls))]
            for key in done:
                del self._values[key]
        return found

    def _get(self, x: Any) -> _Sampled | _Product | None:
        known = self._values.get(id(x))
        return known[1] if known is not None and known[0]() is x else None

    def _add(self, x: Tensor, value: _Sampled | _Product) -> None:
        key = id(x)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if (known := self._values.get(key)) is not None and known[0] is ref:
                del self._values[key]

        self._values[key] = weakref.ref(x, forget), value
        if isinstance(value, _Sampled):
            self._origins.add(x, Origin(value.dims))
