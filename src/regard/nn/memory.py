"""Memory: what a query may attend to beyond the tokens of its own call.

`KVCache` holds the keys and values of earlier steps, `KeyValues` those of another sequence, projected once, and
`SegmentMemory` the hidden states of earlier segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops.demands import must_count
from ..ops.mask import And, Mask, Not, Or
from ..ops.masks import Causal, Diagonal, Dilated, Window


class KVCache:
    """The keys and values of the tokens seen so far, handed over in order of position.

    >>> cache = KVCache()
    >>> k, v = cache.append(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    >>> k, v = cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    >>> k.shape, cache
    (torch.Size([1, 2, 6, 8]), KVCache(length=6))

    `window` is how many keys, its own included, a query may see: older ones are forgotten. What is handed over is a
    view, good until the cache changes. A cache keeps no gradients.
    """

    def __init__(self, *, window: int | None = None) -> None:
        if window is not None:
            must_count("window", window, least=1)
        self.window = window
        self.length = 0  # tokens seen, hence the position of the next
        self._keys, self._values = _Track(window), _Track(window)

    @property
    def kept(self) -> int:
        """How many of the tokens so far the next one may see."""
        return self._keys.kept

    def append(
        self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Add the keys and values of the next tokens; all that their queries may see, old ones first."""
        self._check(k, v)
        self.length += k.shape[2]
        return self._keys.append(k), self._values.append(v)

    def joined(self, k: Float[Tensor, "b g n d"]) -> Float[Tensor, "b g j d"]:
        """The keys `append` would hand over, in a tensor of their own, the cache left as it is."""
        self._keys.check("k", k)
        return self._keys.joined(k)

    def select(self, rows: Int[Tensor, " rows"]) -> KVCache:
        """The cache of these batch rows, in this order, repeats allowed: how beams move."""
        other = KVCache(window=self.window)
        other.length = self.length
        other._keys, other._values = self._keys.select(rows), self._values.select(rows)
        return other

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}{'' if self.window is None else f', window={self.window}'})"

    def _check(self, k: Tensor, v: Tensor) -> None:
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("a cache keeps no gradients, got keys that require them; decode under torch.no_grad()")
        self._keys.check("k", k)
        self._values.check("v", v)


class _Track:
    """One tensor growing along dim 2, in a room with space to spare: a step writes one entry and copies none.

    A full room is left for one twice as large. With a window, what is out of sight stays behind, the room is bounded,
    and it is left once in as many steps as the window is wide: a ring buffer whose entries stay in order.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.room: Tensor | None = None
        self.end = 0

    @property
    def kept(self) -> int:
        return self.end if self.window is None else min(self.end, self.window - 1)

    def append(self, new: Tensor) -> Tensor:
        kept, n = self.kept, new.shape[2]
        if self.room is None or self.end + n > self.room.shape[2]:
            spare = kept + n if self.window is None else self.window
            room = new.new_empty(*new.shape[:2], max(64, kept + n + spare), new.shape[3])
            if self.room is not None:
                room.narrow(2, 0, kept).copy_(self.past())
            self.room, self.end = room, kept
        self.room.narrow(2, self.end, n).copy_(new)
        self.end += n
        return self.room.narrow(2, self.end - n - kept, kept + n)

    def joined(self, new: Tensor) -> Tensor:
        return new if self.room is None else torch.cat((self.past(), new), 2)

    def past(self) -> Tensor:
        assert self.room is not None
        return self.room.narrow(2, self.end - self.kept, self.kept)

    def select(self, rows: Tensor) -> _Track:
        other = _Track(self.window)
        if self.room is not None:
            other.room, other.end = self.room.new_empty(rows.numel(), *self.room.shape[1:]), self.kept
            torch.index_select(self.past(), 0, rows, out=other.room.narrow(2, 0, self.kept))
        return other

    def check(self, name: str, new: Tensor) -> None:
        if self.room is None:
            return
        have, got = (*self.room.shape[:2], self.room.shape[3]), (*new.shape[:2], new.shape[3])
        if have != got or self.room.dtype != new.dtype:
            raise ValueError(
                f"the cache holds {name} with b g d = {have} of {self.room.dtype}, got {got} of {new.dtype}; "
                "start a new KVCache for another batch, or write cache.select(rows)"
            )


@dataclass(frozen=True, eq=False)
class KeyValues:
    """The keys and values of a sequence, projected once and attended to at every step of another."""

    k: Float[Tensor, "b g j d"]
    v: Float[Tensor, "b g j e"]
    key_padding: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> KeyValues:
        """Those of these batch rows, in this order, repeats allowed."""
        padding = None if self.key_padding is None else self.key_padding.index_select(0, rows)
        return KeyValues(self.k.index_select(0, rows), self.v.index_select(0, rows), padding)


class SegmentMemory:
    """The last `length` hidden states of earlier segments, to attend to without gradient (Dai et al. 2019, sec. 3.2).

    >>> memory = SegmentMemory(4)
    >>> [memory.extend(torch.zeros(1, 3, 8)).shape[1] for segment in range(3)]
    [3, 6, 7]

    Queries come from the segment, keys and values from what `extend` returns: `layer(x, memory.extend(x))`. One for
    each layer, a new one for each text.
    """

    def __init__(self, length: int) -> None:
        must_count("length", length)
        self.length = length
        self.states: Float[Tensor, "b m dim"] | None = None

    def extend(self, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b j dim"]:
        """The remembered states, detached, and then x; x is remembered from here on."""
        if self.states is not None and self.states.shape[::2] != x.shape[::2]:
            raise ValueError(
                f"the memory holds b dim = {tuple(self.states.shape[::2])}, got {tuple(x.shape[::2])}; "
                "start a new SegmentMemory for another batch, or write memory.select(rows)"
            )
        whole = x if self.states is None else torch.cat((self.states, x), 1)
        self.states = whole.detach()[:, max(0, whole.shape[1] - self.length) :]
        return whole

    def select(self, rows: Int[Tensor, " rows"]) -> SegmentMemory:
        """The memory of these batch rows, in this order, repeats allowed."""
        other = SegmentMemory(self.length)
        other.states = None if self.states is None else self.states.index_select(0, rows)
        return other


def look_back(mask: Mask | None) -> int | None:
    """How many keys before its own a query may see; None without a bound, or where more than the distance decides."""
    return _reach(mask) if mask is not None and _by_distance(mask) else None


def _by_distance(mask: Mask) -> bool:
    match mask:
        case And() | Or():
            return _by_distance(mask.left) and _by_distance(mask.right)
        case Not():
            return _by_distance(mask.mask)
        case _:
            return isinstance(mask, (Causal, Window, Dilated, Diagonal))


def _reach(mask: Mask) -> int | None:
    match mask:
        case Window():
            return mask.reach[0]
        case Dilated():
            return (mask.width - 1) * mask.step
        case Diagonal():
            return 0
        case And() | Or():
            bounds = [n for n in (_reach(mask.left), _reach(mask.right)) if n is not None]
            if isinstance(mask, And):
                return min(bounds, default=None)
            return max(bounds) if len(bounds) == 2 else None
        case _:
            return None
