"""Variable-length attention (varlen): sequences packed into one row, or padded KV caches with a length per row.

Masks and biases take memory linear in the tokens. Kernels align the last query of a sequence with its last key, or the
first with the first. If one offset holds for all queries, `Causal`, `Window` and `Alibi` express the rest; if not, each
query has its own position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...checks import check_broadcast, check_tensor
from ...ops.terms.biases import Alibi, Bias
from ...ops.terms.coordinates import Coordinates
from ...ops.terms.masks import Causal, Documents, Near, Padding, Window
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.term import term
from ..interception.kernel_call import KernelCall

if TYPE_CHECKING:
    from ...ops.shape import Sizes


@term
class Sloped(Bias):
    """-slope * abs(j - center), both broadcastable to b h i: `Alibi` for packed sequences of different offsets."""

    slopes: Tensor
    center: Tensor

    def __post_init__(self) -> None:
        check_tensor("Sloped slopes", self.slopes)
        check_tensor("Sloped center", self.center)

    def check(self, sizes: Sizes) -> None:
        for name, x in (("slopes", self.slopes), ("center", self.center)):
            check_broadcast(f"Sloped {name}", x, {"b": sizes.b, "h": sizes.h, "i": sizes.i})

    def over(self, at: Coordinates) -> Tensor:
        slopes, center = at.slice_of(self.slopes, "bhi"), at.slice_of(self.center, "bhi")
        return -slopes.to(at.dtype) * (at.j - center.to(at.dtype)).abs()


@dataclass(frozen=True, eq=False)
class VarlenSequences:
    """Positions of the queries of packed or cached sequences, and the keys that belong to each sequence."""

    queries: int
    keys: int
    own: Mask | None = None  # shows the keys of a query's own sequence
    offset: int | None = None  # position of the first query, if one offset holds for all; None: last query at last key
    positions: Tensor | None = None  # b|1 1 i: position of each query, if one offset does not hold for all
    numbers: Tensor | None = None  # i: sequence that each query belongs to, if they are packed

    @classmethod
    def from_starts(
        cls, of_queries: Sequence[int], of_keys: Sequence[int], *, at_end: bool = True, device: torch.device
    ) -> VarlenSequences:
        """Packed sequences, from cu_seqlens of queries and keys; `at_end` aligns the last query with the last key."""
        queries, keys, count = of_queries[-1], of_keys[-1], len(of_queries) - 1
        if count == 1:
            return cls(queries, keys, offset=None if at_end else 0)
        starts, key_starts = (torch.tensor(x, device=device) for x in (of_queries, of_keys))
        lengths, key_lengths = starts.diff(), key_starts.diff()
        each = torch.arange(count, device=device)
        numbers = each.repeat_interleave(lengths, output_size=queries)
        if list(of_queries) == list(of_keys):
            return cls(queries, keys, Documents(numbers), offset=0, numbers=numbers)
        first = key_starts[:-1] + (key_lengths - lengths if at_end else 0) - starts[:-1]
        positions = torch.arange(queries, device=device) + first[numbers]
        documents = Documents(numbers, each.repeat_interleave(key_lengths, output_size=keys))
        return cls(queries, keys, documents, positions=positions[None, None], numbers=numbers)

    @classmethod
    def from_cache(cls, lengths: Sequence[int], queries: int, *, device: torch.device) -> VarlenSequences:
        """Sequences whose keys are the first `lengths` of each row of a KV cache; the last query is at the last key.

        Keys behind the longest sequence are left out.
        """
        keys = max(lengths, default=0)
        if keys == min(lengths, default=0):
            return cls(queries, keys)
        positions = torch.arange(queries, device=device) + torch.tensor(lengths, device=device)[:, None] - queries
        return cls(queries, keys, Padding(tuple(lengths)), positions=positions[:, None])

    def mask(self, before: int | None, after: int | None) -> Mask | None:
        """Return the mask of its own sequence, `before` and `after` keys around a query; None for all."""
        band = self._band(before, after)
        return band if self.own is None else self.own if band is None else band & self.own

    def alibi(self, slopes: Tensor) -> Bias:
        """Return the bias -slope * abs(i - j), with a slope for each head, or for each sequence and head."""
        slopes = slopes.detach().clone()
        if slopes.ndim == 2 and bool((slopes == slopes[:1]).all()):
            slopes = slopes[0]
        if slopes.ndim == 1 and self.positions is None:
            return Alibi(slopes=slopes)
        if slopes.ndim == 1:
            by_row = slopes[:, None]
        else:
            by_row = slopes[..., None] if self.numbers is None else slopes[self.numbers].T
        positions = self.positions
        if positions is None:
            first = self.keys - self.queries if self.offset is None else self.offset
            positions = torch.arange(self.queries, device=slopes.device)[None, None] + first
        return Sloped(by_row, positions)

    def _band(self, before: int | None, after: int | None) -> Mask | None:
        if before is None and after is None:
            return None
        if self.positions is None and after == 0:
            return Causal() if before is None else Causal() & Window(before + 1)
        farthest = self.queries + self.keys
        before, after = (farthest if x is None else min(x, farthest) for x in (before, after))
        if self.positions is not None:
            return Near(self.positions + (after - before) / 2, (before + after) / 2)
        return Window(before + 1) if before == after else Window(before=before, after=after)


def packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: VarlenSequences,
    *,
    before: int | None = None,
    after: int | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    dropout: float = 0.0,
) -> KernelCall:
    """Return the call of such an attention, with q, k and v as `b h i d`.

    A query sees `before` keys before its position and `after` keys after it, None for all.
    """
    bias = None if slopes is None else sequences.alibi(slopes)
    mask = sequences.mask(before, after)
    return KernelCall(
        q=q, k=k, v=v, mask=mask, bias=bias, scale=scale, cap=cap, offset=sequences.offset, dropout=dropout
    )
