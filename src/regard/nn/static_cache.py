"""Static caches: keys and values at fixed addresses, for decoding steps that a CUDA graph replays.

A recorded step always writes to the same tensors, reads all of their entries, and hides those that no query may see.
How far the rows have come is a number on the device, which the step itself increases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .cache import KeyValues, KVCache
from .row_starts import RowStarts


class RowClock:
    """The position of the next token, and the one at which each row begins, shared by the caches of all layers."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.at = torch.zeros((), dtype=torch.long, device=device)
        self.starts = torch.zeros(rows, dtype=torch.long, device=device)
        self._hidden: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    def begin(self) -> None:
        """Forget the masks of the step before."""
        self._hidden.clear()

    def hidden(self, space: int, window: int | None, dtype: torch.dtype) -> Float[Tensor, "rows 1 1 space"]:
        """Return numbers to add to scores: 0 for the entries that the next token may see, -inf for the others.

        The entry of position p is in slot p % space, so the token at position n finds position n - (n - slot) % space.
        """
        key = space, window, dtype
        if key not in self._hidden:
            age = (self.at - torch.arange(space, device=self.at.device)) % space
            visible = age <= (self.at - self.starts)[:, None]
            if window is not None:
                visible = visible & (age < window)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=self.at.device)
            self._hidden[key] = zeros.masked_fill(~visible, float("-inf"))[:, None, None]
        return self._hidden[key]


class StaticCache:
    """The last `space` keys and values of one layer; it takes the place of a `KVCache` in a step of one token per row.

    >>> cache = KVCache()
    >>> _ = cache.append(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8))
    >>> static = StaticCache(RowClock(2, torch.device("cpu")), cache, space=16)
    >>> static.load(cache)
    >>> static.both.shape, static.to_cache(cache.length, None)
    (torch.Size([2, 4, 16, 16]), KVCache(length=5))
    """

    starts = None  # rows that begin later are part of the mask

    def __init__(self, clock: RowClock, like: KVCache, *, space: int) -> None:
        keys, values = like.read(0, 0)
        self.clock, self.window, self.width = clock, like.window, keys.shape[3]
        with torch.inference_mode(False):  # a normal tensor can be written in and outside of inference mode
            shape = (len(clock.starts), keys.shape[1], space, keys.shape[3] + values.shape[3])
            self.both = torch.zeros(shape, dtype=keys.dtype, device=keys.device)

    @property
    def length(self) -> Tensor:
        """The position of the next token."""
        return self.clock.at

    def positions(self, new: int, device: torch.device) -> Int[Tensor, "rows 1"]:
        """Return the position of the next token of each row."""
        return (self.clock.at - self.clock.starts)[:, None]

    def fork(self) -> StaticCache:
        """Return the cache itself: a recorded step changes it."""
        return self

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token per row; return all entries, in any order."""
        return self.extend(torch.cat((k, v), -1), self.width)

    def extend(self, both: Float[Tensor, "rows g 1 d_and_e"], d: int) -> tuple[Tensor, Tensor]:
        """Write keys and values that are one tensor, the first d features being keys; return all entries."""
        space = self.both.shape[2]
        self.both.index_copy_(2, (self.clock.at % space)[None], both)
        k, v = self.both.split_with_sizes((d, self.both.shape[3] - d), 3)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "rows h 1 d"]:
        """Return attention of one token per row to the entries it may see."""
        return attend_visible(q, k, v, self.clock.hidden(self.both.shape[2], self.window, q.dtype))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Put other rows, as many as there are, in the place of all."""
        self.both.copy_(self.both.index_select(0, rows))

    def load(self, cache: KVCache) -> None:
        """Take over the entries of a cache; the rows after those of the cache become zeros."""
        entries = torch.cat(cache.read(0, cache.kept), -1)
        self.both.zero_()[: len(entries)].index_copy_(2, self._slots(cache.length, cache.kept), entries)

    def to_cache(self, length: int, starts: RowStarts | None) -> KVCache:
        """Return the entries as a cache of this length."""
        kept = length if self.window is None else min(length, self.window - 1)
        entries = self.both.index_select(2, self._slots(length, kept))
        return KVCache.of(entries, self.width, window=self.window, length=length, starts=starts)

    def _slots(self, length: int, kept: int) -> Tensor:
        return torch.arange(length - kept, length, device=self.both.device) % self.both.shape[2]


@dataclass(frozen=True, eq=False)
class StaticKeyValues(KeyValues):
    """The keys and values of sources at fixed addresses; `hidden` is added to scores, -inf for padding."""

    hidden: Float[Tensor, "b 1 1 j"] | None = None

    @staticmethod
    def like(source: KeyValues, *, rows: int, space: int) -> StaticKeyValues:
        """Return space for `rows` sources of up to `space` keys."""
        with torch.inference_mode(False):
            k, v = (x.new_zeros(rows, x.shape[1], space, x.shape[3]) for x in (source.k, source.v))
            return StaticKeyValues(k, v, hidden=k.new_zeros(rows, 1, 1, space))

    def attend(self, q: Float[Tensor, "b h i d"]) -> Float[Tensor, "b h i e"]:
        """Return attention to the keys that are no padding."""
        return attend_visible(q, self.k, self.v, self.hidden)

    def load(self, source: KeyValues) -> None:
        """Take over sources; the rows after them see zeros alone."""
        b, n = source.k.shape[0], source.k.shape[2]
        assert self.hidden is not None
        for to, x in ((self.k, source.k), (self.v, source.v)):
            to.zero_()[:b, :, :n] = x
        place = torch.arange(self.k.shape[2], device=self.k.device)
        visible = (place < n).expand(b, -1)
        if source.keep is not None:
            is_bool = source.keep.dtype == torch.bool
            visible = visible & (F.pad(source.keep, (0, len(place) - n)) if is_bool else place < source.keep[:, None])
        # A source without a real key gives zeros, as by the operator: it sees values of 0.
        is_empty = ~visible.any(1, keepdim=True)
        self.v[:b].masked_fill_(is_empty[:, :, None, None], 0.0)
        self.hidden.zero_()[:b].masked_fill_(~(visible | is_empty)[:, None, None], float("-inf"))

    def move(self, rows: Int[Tensor, " rows"]) -> None:
        """Put other sources in the place of the first."""
        assert self.hidden is not None
        for x in (self.k, self.v, self.hidden):
            x[: len(rows)] = x.index_select(0, rows)

    def to_key_values(self) -> KeyValues:
        """Return the sources with keys of their own."""
        assert self.hidden is not None
        return KeyValues(self.k.clone(), self.v.clone(), self.hidden[:, 0, 0] == 0)


def attend_visible(
    q: Float[Tensor, "b h i d"], k: Float[Tensor, "b g j d"], v: Float[Tensor, "b g j e"], hidden: Tensor | None
) -> Float[Tensor, "b h i e"]:
    """Return attention with a mask to add, the same for all queries; the queries of a group are rows of one head."""
    b, h, i, d = q.shape
    grouped = q.reshape(b, k.shape[1], -1, d)  # b g (h / g i) d
    y: Any = F.scaled_dot_product_attention(grouped, k, v, attn_mask=hidden)
    return y.reshape(b, h, i, v.shape[3])
