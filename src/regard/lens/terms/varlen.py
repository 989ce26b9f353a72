"""Texts side by side in one row, or each with as many keys as it has: who sees whom, in memory linear in the tokens.

Kernels count the place of a query from the last key of its own text, or from the first. Where that is one distance for
all queries, `Causal`, `Window` and `Alibi` say the rest; where it is not, each query has a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...checks import check_broadcast, check_tensor
from ...ops.terms.biases import Alibi, Bias
from ...ops.terms.coordinates import Coordinates
from ...ops.terms.masks import Causal, Documents, Near, Padding, Window
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.term import term

if TYPE_CHECKING:
    from ...ops.shape import Sizes


@term
class Sloped(Bias):
    """-slope * abs(j - center), of each query's own, broadcastable to b h i: `Alibi` where texts differ."""

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
class Texts:
    """Where queries stand among keys, and which keys are of their text."""

    queries: int  # how many there are
    keys: int
    own: Mask | None = None  # the keys of a query's own text
    offset: int | None = None  # the place of the first query, if it is one for all texts; None for the last at the end
    places: Tensor | None = None  # b|1 1 i, those of all queries where it is not
    numbers: Tensor | None = None  # i, of the texts that stand side by side

    @classmethod
    def packed(
        cls, of_queries: Sequence[int], of_keys: Sequence[int], *, at_end: bool = True, device: torch.device
    ) -> Texts:
        """Texts side by side, from where each begins and the last ends; `at_end`: the last query at the last key."""
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
        places = torch.arange(queries, device=device) + first[numbers]
        documents = Documents(numbers, each.repeat_interleave(key_lengths, output_size=keys))
        return cls(queries, keys, documents, places=places[None, None], numbers=numbers)

    @classmethod
    def cached(cls, lengths: Sequence[int], queries: int, *, device: torch.device) -> Texts:
        """Texts of a batch whose keys are the first of each row of a cache; the last query stands at the last of them.

        Keys after the longest are left out.
        """
        keys = max(lengths, default=0)
        if keys == min(lengths, default=0):
            return cls(queries, keys)
        places = torch.arange(queries, device=device) + torch.tensor(lengths, device=device)[:, None] - queries
        return cls(queries, keys, Padding(tuple(lengths)), places=places[:, None])

    def seen(self, before: int | None, after: int | None) -> Mask | None:
        """The keys of its text that a query sees, as many before and after its own place; None for all."""
        band = self._band(before, after)
        return band if self.own is None else self.own if band is None else band & self.own

    def sloped(self, slopes: Tensor) -> Bias:
        """-slope * abs(i - j), the slopes one for each head, or for each text and head."""
        slopes = slopes.detach().clone()
        if slopes.ndim == 2 and bool((slopes == slopes[:1]).all()):
            slopes = slopes[0]
        if slopes.ndim == 1 and self.places is None:
            return Alibi(slopes=slopes)
        if slopes.ndim == 1:
            by_row = slopes[:, None]
        else:
            by_row = slopes[..., None] if self.numbers is None else slopes[self.numbers].T
        places = self.places
        if places is None:
            first = self.keys - self.queries if self.offset is None else self.offset
            places = torch.arange(self.queries, device=slopes.device)[None, None] + first
        return Sloped(by_row, places)

    def _band(self, before: int | None, after: int | None) -> Mask | None:
        if before is None and after is None:
            return None
        if self.places is None and after == 0:
            return Causal() if before is None else Causal() & Window(before + 1)
        farthest = self.queries + self.keys
        before, after = (farthest if x is None else min(x, farthest) for x in (before, after))
        if self.places is not None:
            return Near(self.places + (after - before) / 2, (before + after) / 2)
        return Window(before + 1) if before == after else Window(before=before, after=after)


def told_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    texts: Texts,
    *,
    before: int | None = None,
    after: int | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> dict[str, Any]:
    """What a `Reader` is to be told of such an attention over b h i d."""
    bias = None if slopes is None else texts.sloped(slopes)
    mask = texts.seen(before, after)
    return {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "scale": scale, "cap": cap, "offset": texts.offset}
