"""Caches: keys, values and states from before, which a query may attend to beside the tokens of its own call.

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
    """The keys and values of the tokens so far, in order of position.

    >>> cache = KVCache()
    >>> k, v = cache.append(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    >>> k, v = cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    >>> k.shape, cache
    (torch.Size([1, 2, 6, 8]), KVCache(length=6))

    `window` is the number of keys, its own included, that a query may see: the cache forgets older ones. `append`
    returns views of the cache. A cache keeps no gradients.
    """

    def __init__(self, *, window: int | None = None) -> None:
        if window is not None:
            check_int("window", window, least=1)
        self.window = window
        self.length = 0  # tokens so far, which is the position of the next one
        self._buffer: _Buffer | None = None
        self._end = 0  # this cache has the entries of the buffer before here

    @property
    def kept(self) -> int:
        """Number of tokens so far that the next one may see."""
        return self._end if self.window is None else min(self._end, self.window - 1)

    def append(
        self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Add the keys and values of the next tokens; return all that their queries may see, oldest first."""
        if self._buffer is not None:
            for name, new, old in zip("kv", (k, v), self._buffer.read(0, 0), strict=True):
                _check_fits(name, new, old)
        if k.dtype != v.dtype:
            raise ValueError(f"k and v must have the same dtype, got {k.dtype} and {v.dtype}; write v.to(k.dtype)")
        return self.extend(torch.cat((k, v), -1), k.shape[3])

    def extend(
        self, both: Float[Tensor, "b g n d_and_e"], d: int
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Append keys and values that are one tensor, the first d features being keys."""
        if torch.is_grad_enabled() and both.requires_grad:
            raise ValueError("a cache keeps no gradients, got keys that require them; decode under torch.no_grad()")
        n, kept, buffer = both.shape[2], self.kept, self._buffer
        if buffer is not None:
            _check_fits("keys and values", both, buffer.both)
        if buffer is None or buffer.written != self._end or self._end + n > buffer.both.shape[2]:
            buffer = self._move(both, d)
        buffer.write(self._end, both)
        self._end += n
        self.length += n
        return buffer.read(self._end - n - kept, kept + n)

    def joined(self, k: Float[Tensor, "b g n d"]) -> Float[Tensor, "b g j d"]:
        """Return the keys that `append` would return, in a new tensor, without changing the cache."""
        if self._buffer is None:
            return k
        past, _ = self._buffer.read(self._end - self.kept, self.kept)
        _check_fits("k", k, past)
        return torch.cat((past, k), 2)

    def select(self, rows: Int[Tensor, " rows"]) -> KVCache:
        """Return a cache of these batch rows, in this order; a row may repeat, as in beam search."""
        other = self.fork()
        if self._buffer is not None:
            other._buffer = self._buffer.select(rows, self._end - self.kept, self.kept)
            other._end = self.kept
        return other

    def fork(self) -> KVCache:
        """Return a second cache with the same entries, without a copy; either appends without changing the other."""
        other = KVCache(window=self.window)
        other.length, other._buffer, other._end = self.length, self._buffer, self._end
        return other

    def become(self, other: KVCache) -> None:
        """Take over the entries of a fork of this cache that grew, so that a call that raises changes nothing."""
        self.length, self._buffer, self._end = other.length, other._buffer, other._end

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}{'' if self.window is None else f', window={self.window}'})"

    def _move(self, both: Tensor, d: int) -> _Buffer:
        """Move the entries in sight to a new buffer, with space for the next tokens."""
        n, kept = both.shape[2], self.kept
        buffer = _Buffer.like(both, d, max(64, kept + n + (kept + n if self.window is None else self.window)))
        if self._buffer is not None:
            buffer.write(0, self._buffer.both.narrow(2, self._end - kept, kept))
        self._buffer, self._end = buffer, kept
        return buffer


@dataclass
class _Buffer:
    """Keys and values side by side in a tensor with free space: a step writes one entry and copies none.

    Forks of a cache share its buffer, each up to its own end. The first one to write continues in the buffer; the
    others, and one whose buffer is full, move to a buffer twice as large. With a window, entries out of sight stay
    behind, so the size of the buffer is bounded, and a move happens once in `window` steps: a ring buffer whose entries
    stay in order.
    """

    both: Float[Tensor, "b g space d_and_e"]
    widths: tuple[int, int]  # d e
    written: int = 0

    @staticmethod
    def like(both: Tensor, d: int, space: int, rows: int | None = None) -> _Buffer:
        b, g, _, width = both.shape
        with torch.inference_mode(False):  # a normal tensor can be written in and outside of inference mode
            buffer = both.new_empty(b if rows is None else rows, g, space, width)
        return _Buffer(buffer, (d, width - d))

    def write(self, first: int, both: Tensor) -> None:
        n = both.shape[2]
        self.both.narrow(2, first, n).copy_(both)
        self.written = first + n

    def read(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        k, v = self.both.narrow(2, first, n).split_with_sizes(self.widths, 3)
        return k, v

    def select(self, rows: Tensor, first: int, n: int) -> _Buffer:
        """Return a buffer with the given n entries of each row."""
        other = _Buffer.like(self.both, self.widths[0], self.both.shape[2], rows.numel())
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
    keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None

    @cached_property
    def mask(self) -> Padding | None:
        """The padding as one term for all steps, so that it is inspected once; None if all keys are real."""
        return None if self.keep is None else Padding(self.keep)

    def select(self, rows: Int[Tensor, " rows"]) -> KeyValues:
        """Return the keys and values of these batch rows, in this order; a row may repeat."""
        padding = None if self.keep is None else self.keep.index_select(0, rows)
        return KeyValues(self.k.index_select(0, rows), self.v.index_select(0, rows), padding)


class SegmentMemory:
    """The last `length` hidden states of earlier segments, to attend to without gradient (Dai et al. 2019, sec. 3.2).

    >>> memory = SegmentMemory(4)
    >>> [memory.extend(torch.zeros(1, 3, 8)).shape[1] for segment in range(3)]
    [3, 6, 7]

    Queries come from the segment, keys and values from what `extend` returns: `layer(x, memory.extend(x))`. Make one
    for each layer, and new ones for each text.
    """

    def __init__(self, length: int) -> None:
        check_int("length", length)
        self.length = length
        self.states: Float[Tensor, "b m dim"] | None = None

    def extend(self, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b j dim"]:
        """Return the remembered states, detached, followed by x, and remember x."""
        if self.states is not None and self.states.shape[::2] != x.shape[::2]:
            raise ValueError(
                f"the memory holds b dim = {tuple(self.states.shape[::2])}, got {tuple(x.shape[::2])}; "
                "start a new SegmentMemory for another batch, or write memory.select(rows)"
            )
        whole = x if self.states is None else torch.cat((self.states, x), 1)
        self.states = whole.detach()[:, max(0, whole.shape[1] - self.length) :]
        return whole

    def select(self, rows: Int[Tensor, " rows"]) -> SegmentMemory:
        """Return a memory of these batch rows, in this order; a row may repeat."""
        other = SegmentMemory(self.length)
        other.states = None if self.states is None else self.states.index_select(0, rows)
        return other
