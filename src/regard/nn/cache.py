"""Caches: keys, values and states from before, which a query may attend to beside the tokens of its own call.

`KVCache` holds the keys and values of earlier steps, `KeyValues` those of another sequence, projected once, and
`SegmentMemory` the hidden states of earlier segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import check_int
from ..ops.terms.masks import Documents, Padding
from ..ops.torch_state import can_read_values
from ..torch_internals import is_only_tensor_of_memory
from .cache_blocks import BlockTable
from .row_starts import PackedLengths, RowStarts

MAX_LEFT_BYTES = 2**25  # larger tensors are not kept for the next selection


class KVCache:
    """The keys and values of the tokens so far, in order of position.

    >>> cache = KVCache()
    >>> k, v = cache.append(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    >>> k, v = cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    >>> k.shape, cache
    (torch.Size([1, 2, 6, 8]), KVCache(length=6))

    Rows may have different lengths. They end together, so shorter rows begin later, and `padding` hides what lies
    before them.

    >>> cache = KVCache()
    >>> k, v = cache.append(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), lengths=torch.tensor([5, 3]))
    >>> cache, cache.padding(new=0).keys[1].tolist()
    (KVCache(lengths=[5, 3]), [False, False, True, True, True])

    `window` is the number of keys, its own included, that a query may see: the cache forgets older ones. With `block`,
    entries are stored in blocks of that many tokens, which rows share after `select` until they differ, as the beams
    of one prompt do: memory for the tokens there are, at the price of one copy at each step. `append` returns views of
    the cache, or that copy. A cache keeps no gradients.
    """

    def __init__(self, *, window: int | None = None, block: int | None = None) -> None:
        for name, value in (("window", window), ("block", block)):
            if value is not None:
                check_int(name, value, least=1)
        self.window = window
        self.block = block
        self.length = 0  # tokens so far of the longest row, which is the position of its next one
        self.starts: RowStarts | None = None  # None if all rows have the same length
        self._buffer: _Buffer | BlockTable | None = None
        self._end = 0  # this cache has the entries of the buffer before here
        self._shown = 0  # entries that the last call of `append` returned

    @property
    def kept(self) -> int:
        """Number of tokens so far that the next one may see."""
        return self._end if self.window is None else min(self._end, self.window - 1)

    @property
    def lengths(self) -> Int[Tensor, " b"] | None:
        """Number of tokens of each row; None if all have `length`."""
        return None if self.starts is None else self.length - self.starts.starts

    @property
    def is_relative(self) -> bool:
        """Whether entries are not at their positions: the cache forgets old ones, or rows begin at different ones."""
        return self.window is not None or self.starts is not None

    def padding(self, new: int | None = None) -> Padding | None:
        """Return the mask of the keys that the last `append` returned, or that the next one of `new` tokens will.

        It hides what lies before the rows; None if nothing does.
        """
        if self.starts is None:
            return None
        n = self._shown if new is None else self.kept + new
        return self.starts.padding(self.length + (new or 0) - n, n)

    def positions(self, new: int, device: torch.device) -> Int[Tensor, "*b new"]:
        """Return the positions of the next `new` tokens, of each row if their lengths differ."""
        following = torch.arange(self.length, self.length + new, device=device)
        return following if self.starts is None else following - self.starts.starts[:, None]

    def check_one_length(self) -> None:
        """Raise if rows have different lengths, for layers that do not hide what lies before the shorter ones."""
        if self.starts is not None:
            raise ValueError(f"{self!r} has rows of different lengths, which this layer does not take; pass one row")

    def append(
        self,
        k: Float[Tensor, "b g n d"],
        v: Float[Tensor, "b g n e"],
        *,
        lengths: Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Add the keys and values of the next tokens; return all that their queries may see, oldest first.

        With `lengths`, only the first `lengths[r]` tokens of row r are new, and the others are ignored. Their queries
        are at the last `lengths[r]` of the returned keys: `attend(..., offset=k.shape[2] - lengths)`.
        """
        if self._buffer is not None:
            for name, new, old in zip("kv", (k, v), self._buffer.read(0, 0), strict=True):
                _check_fits(name, new, old)
        if k.dtype != v.dtype:
            raise ValueError(f"k and v must have the same dtype, got {k.dtype} and {v.dtype}; write v.to(k.dtype)")
        both = torch.cat((k, v), -1)
        if lengths is None:
            return self.extend(both, k.shape[3])
        if lengths.shape != k.shape[:1] or int(lengths.min()) < 0 or int(lengths.max()) > k.shape[2]:
            raise ValueError(
                f"lengths must be one number per row, from 0 to {k.shape[2]}, for {k.shape[0]} rows, "
                f"got {lengths.tolist()}"
            )
        return self._extend_rows([row[:, :n] for row, n in zip(both, lengths.tolist(), strict=True)], k.shape[3])

    def extend(
        self, both: Float[Tensor, "b g n d_and_e"], d: int
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Append keys and values that are one tensor, the first d features being keys."""
        _check_no_gradients(both)
        n, kept = both.shape[2], self.kept
        if self._buffer is not None:
            _check_fits("keys and values", both, self._buffer)
        buffer = self._with_space(both, d, kept).write(self._end, both)
        self._buffer, self._shown = buffer, kept + n
        self._end += n
        self.length += n
        return buffer.read(self._end - n - kept, kept + n)

    def prompts(self, packed: PackedLengths) -> PackedPrompts:
        """Return the cache to pass with texts that follow each other in one row, `layer(x, cache=cache.prompts(p))`.

        The texts become the rows of this cache, which must be empty, and see nothing of each other.
        """
        if self.length:
            raise ValueError(f"prompts begin a cache, got {self!r}; start a new KVCache, or append(k, v, lengths=...)")
        return PackedPrompts(self, packed)

    @classmethod
    def of(
        cls,
        both: Float[Tensor, "b g n d_and_e"],
        d: int,
        *,
        window: int | None,
        length: int,
        starts: RowStarts | None,
    ) -> KVCache:
        """Return a cache of the last n of `length` tokens; `starts` are the entries at which its rows begin."""
        cache = cls(window=window)
        cache.extend(both, d)
        cache.length, cache.starts = length, starts
        return cache

    @property
    def is_empty(self) -> bool:
        """Whether no token was appended, so that the cache does not know its rows."""
        return self._buffer is None

    def read(self, first: int, n: int) -> tuple[Float[Tensor, "b g n d"], Float[Tensor, "b g n e"]]:
        """Return n of the `kept` entries from the given one on; the cache must not be empty."""
        assert self._buffer is not None
        return self._buffer.read(self._end - self.kept + first, n)

    def join(self, k: Float[Tensor, "b g n d"]) -> Float[Tensor, "b g j d"]:
        """Return the keys that `append` would return, in a new tensor, without changing the cache."""
        if self._buffer is None:
            return k
        past, _ = self.read(0, self.kept)
        _check_fits("k", k, past)
        return torch.cat((past, k), 2)

    def select(self, rows: Int[Tensor, " rows"]) -> KVCache:
        """Return a cache of the given batch rows, in their order; a row may repeat, as in beam search."""
        other = self.fork()
        other.starts = None if self.starts is None else self.starts.select(rows)
        if isinstance(self._buffer, BlockTable):
            other._buffer = self._buffer.select(rows)
        elif self._buffer is not None:
            other._buffer = self._buffer.select(rows, self._end - self.kept, self.kept)
            other._end = self.kept
        return other

    def fork(self) -> KVCache:
        """Return a second cache with the same entries, without a copy; either appends without changing the other."""
        other = KVCache(window=self.window, block=self.block)
        other.become(self)
        return other

    def become(self, other: KVCache) -> None:
        """Take over the entries of a fork of this cache that grew, so that a call that raises changes nothing."""
        self.length, self.starts, self._buffer = other.length, other.starts, other._buffer
        self._end, self._shown = other._end, other._shown

    def __repr__(self) -> str:
        shown = f"length={self.length}" if self.lengths is None else f"lengths={self.lengths.tolist()}"
        options = {"window": self.window, "block": self.block}
        return f"KVCache({shown}{''.join(f', {name}={x}' for name, x in options.items() if x is not None)})"

    def _with_space(self, both: Tensor, d: int, kept: int) -> _Buffer | BlockTable:
        """Return the storage with space for the next tokens; `_end` becomes the place of the first of them."""
        buffer = self._buffer
        if self.block is not None:
            assert not isinstance(buffer, _Buffer)
            gone = (self._end - kept) // self.block
            self._end -= gone * self.block
            return BlockTable.empty(both, d, self.block) if buffer is None else buffer.without_first(gone)
        assert not isinstance(buffer, BlockTable)
        if buffer is not None and buffer.written == self._end and self._end + both.shape[2] <= buffer.both.shape[2]:
            return buffer
        moved = _Buffer.like(both, d, self._space(kept + both.shape[2]))
        if buffer is not None:
            moved.write(0, buffer.both.narrow(2, self._end - kept, kept))
            moved.start = buffer.start if kept == self._end else None
        self._end = kept
        return moved

    def _space(self, n: int) -> int:
        """Entries of a new buffer that n of them go to."""
        return max(64, n + (n if self.window is None else self.window))

    def _extend_rows(
        self, parts: Sequence[Float[Tensor, "g n d_and_e"]], d: int, packed: PackedLengths | None = None
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j e"]]:
        """Append parts of different lengths, one to each row, in new storage where rows end together again.

        `packed` holds their lengths if they begin the cache, so that the caches of all layers share its tensors.
        """
        _check_no_gradients(parts[0])
        kept, new = self.kept, max(part.shape[1] for part in parts)
        first = self.length - kept  # the entry at which the kept ones begin
        begun = [0] * len(parts) if self.starts is None else [max(0, n - first) for n in self.starts.numbers]
        if packed is None:
            added = torch.tensor([part.shape[1] for part in parts], device=parts[0].device)
            total = added + (self.length if self.lengths is None else self.lengths)
            length = int(total.max())
            starts, end = RowStarts(length - total), min(length, kept + new)
        else:
            starts, length, end = packed.starts, packed.width, packed.width
        g, _, width = parts[0].shape
        both = parts[0].new_zeros(len(parts), g, end, width)
        past = None if self._buffer is None else torch.cat(self._buffer.read(self._end - kept, kept), -1)
        for row, (part, start) in enumerate(zip(parts, begun, strict=True)):
            at = end - part.shape[1]
            both[row, :, at:] = part
            if past is not None:
                both[row, :, at - (kept - start) : at] = past[row, :, start:]
        if self.block is None:
            self._buffer = _Buffer.like(both, d, self._space(end)).write(0, both)
        else:
            self._buffer = BlockTable.empty(both, d, self.block).write(
                0, both, [n - (length - end) for n in starts.numbers]
            )
        self.starts = starts if starts.last else None
        self.length, self._end, self._shown = length, end, end
        return self._buffer.read(0, end)


class PackedPrompts:
    """An empty cache that gets texts which follow each other in one row; each becomes a row of the cache.

    `Attention` takes it in place of the cache. It hides the texts from each other and counts positions within each.
    """

    window = None
    length = kept = 0
    is_relative = True

    def __init__(self, cache: KVCache, packed: PackedLengths) -> None:
        self._cache, self._packed = cache, packed

    def padding(self, new: int) -> Documents:
        """Return the mask under which a text sees nothing of the others."""
        if new != len(self._packed.texts):
            raise ValueError(f"the texts have {len(self._packed.texts)} tokens together, got {new}")
        return self._packed.mask

    def positions(self, new: int, device: torch.device) -> Int[Tensor, "1 new"]:
        """Return the position of each token in its text."""
        return self._packed.positions[None]

    def append(
        self, k: Float[Tensor, "1 g n d"], v: Float[Tensor, "1 g n e"]
    ) -> tuple[Float[Tensor, "1 g n d"], Float[Tensor, "1 g n e"]]:
        """Give the tokens to the rows of the cache; return them as they are, which is what their queries may see."""
        parts = torch.cat((k, v), -1)[0].split(self._packed.lengths, 1)
        self._cache._extend_rows(parts, k.shape[3], self._packed)
        return k, v

    def check_one_length(self) -> None:
        """Raise: the layer would let the texts see each other."""
        raise ValueError("this layer does not read several texts in one row; pass one text for each row, and keep=")

    def join(self, k: Float[Tensor, "1 g n d"]) -> Float[Tensor, "1 g n d"]:
        """Return k: the keys that `append` would return."""
        return k

    def fork(self) -> PackedPrompts:
        """Return the same for a fork of the cache."""
        return PackedPrompts(self._cache.fork(), self._packed)

    def become(self, other: PackedPrompts) -> None:
        """Take over the entries of a fork."""
        self._cache.become(other._cache)


@dataclass(frozen=True, eq=False)
class _SharedStart:
    """The first n entries of the rows of a buffer: the same in rows with the same origin, as in beams of one prompt.

    No cache writes to them, so buffers that hold the same object hold the same numbers there.
    """

    origins: Int[Tensor, " b"]
    n: int

    def select(self, rows: Tensor) -> _SharedStart:
        """Return the start of the given rows: the same object if none gets entries of another origin."""
        origins = self.origins.index_select(0, rows)
        return self if torch.equal(origins, self.origins) else _SharedStart(origins, self.n)


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
    start: _SharedStart | None = None  # None if no rows were selected, or the first entries were forgotten since
    left: _Buffer | None = None  # the tensor of the buffer this one was selected from, for the next selection

    @property
    def shape(self) -> tuple[int, int, int]:
        """b g d_and_e."""
        b, g, _, width = self.both.shape
        return b, g, width

    @property
    def dtype(self) -> torch.dtype:
        return self.both.dtype

    @staticmethod
    def like(both: Tensor, d: int, space: int, rows: int | None = None) -> _Buffer:
        b, g, _, width = both.shape
        with torch.inference_mode(False):  # a normal tensor can be written in and outside of inference mode
            buffer = both.new_empty(b if rows is None else rows, g, space, width)
        return _Buffer(buffer, (d, width - d))

    def write(self, first: int, both: Tensor) -> _Buffer:
        n = both.shape[2]
        self.both.narrow(2, first, n).copy_(both)
        self.written = first + n
        return self

    def read(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        k, v = self.both.narrow(2, first, n).split_with_sizes(self.widths, 3)
        return k, v

    def select(self, rows: Tensor, first: int, n: int) -> _Buffer:
        """Return a buffer with the given n entries of each row.

        A beam search selects at every step. On a CPU it writes in turns into two tensors, because the first write to
        memory that is new to the process takes longer than the copy. A tensor is written again once nothing else holds
        it. The beams of a prompt move among themselves, so both tensors keep the prompt, and only what follows is
        copied.
        """
        space, left = self.both.shape[2], self.left
        if not can_read_values(rows):  # to compare where rows come from would wait for the device
            other = _Buffer.like(self.both, self.widths[0], space, rows.numel())
            torch.index_select(self.both.narrow(2, first, n), 0, rows, out=other.both.narrow(2, 0, n))
            other.written = n
            return other
        start = _SharedStart(rows.clone(), n) if first or self.start is None else self.start.select(rows)
        done = 0
        if left is not None and len(left.both) == rows.numel() and is_only_tensor_of_memory(left.both):
            other = _Buffer(left.both, self.widths)
            done = start.n if start is left.start else 0
        else:
            other = _Buffer.like(self.both, self.widths[0], space, rows.numel())
        torch.index_select(self.both[:, :, first + done : first + n], 0, rows, out=other.both[:, :, done:n])
        other.written, other.start = n, start
        if self.both.nbytes <= MAX_LEFT_BYTES:
            with torch.inference_mode(False):  # a view would hold the tensor it is a view of
                other.left = _Buffer(self.both.detach(), self.widths, start=self.start)
        return other


def _check_no_gradients(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("a cache keeps no gradients, got keys that require them; decode under torch.no_grad()")


def _check_fits(name: str, new: Tensor, old: Tensor | _Buffer | BlockTable) -> None:
    b, g, d = old.shape[:2] + old.shape[-1:]
    new_b, new_g, _, new_d = new.shape
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
        """Return the keys and values of the given batch rows, in their order; a row may repeat."""
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
        """Return a memory of the given batch rows, in their order; a row may repeat."""
        other = SegmentMemory(self.length)
        other.states = None if self.states is None else self.states.index_select(0, rows)
        return other
