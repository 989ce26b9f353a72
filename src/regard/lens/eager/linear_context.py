"""Recognize linear attention whose softmax is over positions alone: q @ (k.softmax(-2).mT @ v).

    context = k.softmax(-2).mT @ v  # d e, as if d queries attended to the positions
    out = q @ context               # i e, without any weights of queries over keys

The first product alone is what a pooling layer with d learned queries computes, so it is recorded. If activations are
then multiplied with the context and summed over its d rows, these are feature channels, and the entry is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dim_origins import CONTEXT, DimOrigins, Factor, Origin
from .matmul import EINSUM_NAMES, Average, operands, parse_contraction


class Read(NamedTuple):
    """A product that sums over the rows of a context."""

    entry: Any  # the value given to `keep`, None without one
    queries: Tensor


class LinearContexts:
    """The averages over positions that may be contexts, found again by the origin of their rows."""

    def __init__(self, origins: DimOrigins) -> None:
        self._origins = origins
        self._numbers = count()
        self._entries: dict[str, Any] = {}  # kind of the dim of rows -> value given to `keep`

    def begin(self, average: Average, out: Tensor) -> str:
        """Follow an average from now on; return the kind of its dim of rows, "" if it has none."""
        if average.summed or average.projection is not None:
            return ""
        numbered = torch.empty_strided(out.shape, tuple(range(1, out.ndim + 1)), device="meta")
        rows = average.heads(numbered)  # a view: its strides number the dims of the output
        if (rows is not numbered and rows._base is not numbered) or rows.shape[-2] < 2:
            return ""
        dims, at = list(self._origins.origin_of(out).dims), rows.stride(-2) - 1
        kind = f"{CONTEXT} {next(self._numbers)}"
        dims[at] = (Factor(kind, out.shape[at]),)
        self._origins.add(out, Origin(tuple(dims)))
        self._entries[kind] = None
        return kind

    @property
    def held(self) -> bool:
        """Whether a context is followed."""
        return bool(self._entries)

    def keep(self, kind: str, entry: Any) -> None:
        """Keep a value with a context, such as its entry on the tape."""
        self._entries[kind] = entry

    def read(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], may_be_queries: Callable[[Tensor], bool]
    ) -> Read | None:
        """Return the context that a product reads; None if it sums over the rows of none."""
        if not self._entries:
            return None
        for x, dim, other in _summed_dims(name, args, kwargs):
            origin = self._origins.get(x)
            for kind, _ in () if origin is None else origin.dims[dim]:
                if kind in self._entries and may_be_queries(other):
                    return Read(self._entries.pop(kind), other)
        return None

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()


def _summed_dims(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield each factor of a product, a dim of it that is summed over, and the other factor, if that has rows."""
    if name in EINSUM_NAMES:
        if (parsed := parse_contraction(name, args, kwargs)) is None:
            return
        *factors, out = parsed
        for a, x in factors:
            for b, y in factors:
                has_rows = any(
                    label in out and label not in a and size > 1 for label, size in zip(b, y.shape, strict=True)
                )
                if x is not y and has_rows:
                    yield from ((x, dim, y) for dim, label in enumerate(a) if label in b and label not in out)
        return
    left, right = [x for x in operands(name, args, kwargs) if isinstance(x, Tensor)][-2:]
    if left.ndim > 1 and right.ndim > 1:
        if right.shape[-1] > 1:
            yield left, left.ndim - 1, right
        if left.shape[-2] > 1:
            yield right, right.ndim - 2, left
