"""Memory: what a query may attend to beyond the tokens of its own call.

`KVCache` holds the keys and values of earlier steps, `KeyValues` those of another sequence, projected once, and
`SegmentMemory` the hidden states of earlier segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import check_int
from ..ops.terms.masks import Padding


class KVCache:
    """The keys and values of the tokens seen so far, handed over in order of position.

    >>> cache = KVCache()
    >>> k, v = cache.append(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    >>> k, v = cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    >>> k.shape, cache
    (torch.Size([1, 2, 6, 8]), KVCache(length=6))

    `window` is how many keys, its own included, a query may see: older ones are forgotten. What is handed over is a
    view. A cache keeps no gradients.
    """

    def __init__(self, *, window: int | None = None) -> None:
        if window is not None:
            check_int("window", window, least=1)
        self.window = window
        self.length = 0  # tokens seen, hence the position of the next
        self._room: _Room | None = None
        self._end = 0  # of what this cache sees of its room

    @property
    def kept(self) -> int:
        """How many of the tokens so far the next one may see."""
        return self._end if self.window is None else min(self._end, self.window - 1)

    def append(
        self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Add the keys and values of the next tokens; all that their queries may see, old ones first."""
        if self._room is not None:
            for name, new, old in zip("kv", (k, v), self._room.read(0, 0), strict=True):
                _check_fits(name, new, old)
        if k.dtype != v.dtype:
            raise ValueError(f"k and v must have the same dtype, got {k.dtype} and {v.dtype}; write v.to(k.dtype)")
        return self.extend(torch.cat((k, v), -1), k.shape[3])

    def extend(
        self, both: Float[Tensor, "b g n d_and_e"], d: int
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """The same for keys and values side by side, keys the first d features of them."""
        if torch.is_grad_enabled() and both.requires_grad:
            raise ValueError("a cache keeps no gradients, got keys that require them; decode under torch.no_grad()")
        n, kept, room = both.shape[2], self.kept, self._room
        if room is not None:
            _check_fits("keys and values", both, room.both)
        if room is None or room.written != self._end or self._end + n > room.both.shape[2]:
            room = self._move(both, d)
        room.write(self._end, both)
        self._end += n
        self.length += n
        return room.read(self._end - n - kept, kept + n)

    def joined(self, k: Float[Tensor, "b g n d"]) -> Float[Tensor, "b g j d"]:
        """The keys `append` would hand over, in a tensor of their own, the cache left as it is."""
        if self._room is None:
            return k
        past, _ = self._room.read(self._end - self.kept, self.kept)
        _check_fits("k", k, past)
        return torch.cat((past, k), 2)

    def select(self, rows: Int[Tensor, " rows"]) -> KVCache:
        """The cache of these batch rows, in this order, repeats allowed: how beams move."""
        other = self.fork()
        if self._room is not None:
            other._room = self._room.select(rows, self._end - self.kept, self.kept)
            other._end = self.kept
        return other

    def fork(self) -> KVCache:
        """The same cache once more, at no cost: what one of the two appends, the other does not see."""
        other = KVCache(window=self.window)
        other.length, other._room, other._end = self.length, self._room, self._end
        return other

    def become(self, other: KVCache) -> None:
        """From here on what the other is, a fork of this one that has grown: so what fails leaves no trace."""
        self.length, self._room, self._end = other.length, other._room, other._end

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}{'' if self.window is None else f', window={self.window}'})"

    def _move(self, both: Tensor, d: int) -> _Room:
        """Into a room of its own, with what is still in sight and space for what comes."""
        n, kept = both.shape[2], self.kept
        room = _Room.like(both, d, max(64, kept + n + (kept + n if self.window is None else self.window)))
        if self._room is not None:
            room.write(0, self._room.both.narrow(2, self._end - kept, kept))
        self._room, self._end = room, kept
        return room


@dataclass
class _Room:
    """Keys and values side by side, in a tensor with space to spare: a step writes one entry and copies none.

    The caches forked from one share its room, each up to its own end. The first to write goes on in it; another, or
    one whose room is full, moves to a room twice as large. With a window, what is out of sight stays behind, the room
    is bounded, and it is left once in as many steps as the window is wide: a ring buffer whose entries stay in order.
    """

    both: Float[Tensor, "b g space d_and_e"]
    widths: tuple[int, int]  # d e
    written: int = 0

    @staticmethod
    def like(both: Tensor, d: int, space: int, rows: int | None = None) -> _Room:
        b, g, _, width = both.shape
        with torch.inference_mode(False):  # so that steps outside of inference mode may write, too
            room = both.new_empty(b if rows is None else rows, g, space, width)
        return _Room(room, (d, width - d))

    def write(self, first: int, both: Tensor) -> None:
        n = both.shape[2]
        self.both.narrow(2, first, n).copy_(both)
        self.written = first + n

    def read(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        k, v = self.both.narrow(2, first, n).split_with_sizes(self.widths, 3)
        return k, v

    def select(self, rows: Tensor, first: int, n: int) -> _Room:
        """A room with these n entries of these rows."""
        other = _Room.like(self.both, self.widths[0], self.both.shape[2], rows.numel())
        torch.index_select(self.both.narrow(2, first, n), 0, rows, out=other.both.narrow(2, 0, n))
        other.written = n
        return other


def _check_fits(name: str, new: Tensor, old: Tensor) -> None:
    (b, g, _, d), (new_b, new_g, _, new_d) = old.shape, new.shape
    if b != new_b or g != new_g or d != new_d or old.dtype != new.dtype:
        raise ValueError(
            f"the cache holds {name} with b g d = {(b, g, d)} of {old.dtype}, got {(new_b, new_g, new_d)} of "
            f"{new.dtype}; start a new KVCache for another batch, or write cache.select(rows)"
        )


@dataclass(frozen=True, eq=False)
class KeyValues:
    """The keys and values of a sequence, projected once and attended to at every step of another."""

    k: Float[Tensor, "b g j d"]
    v: Float[Tensor, "b g j e"]
    key_padding: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None

    @cached_property
    def mask(self) -> Padding | None:
        """Which keys are real, the same term at every step, so that it is read once; None where all are."""
        return None if self.key_padding is None else Padding(self.key_padding)

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
        check_int("length", length)
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
