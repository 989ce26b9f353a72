"""Infer mask and bias terms from dense mask tensors.

Models pass (b, 1, N, N) tensors to their kernels for masks that were causal, windowed, padded or packed. `recognize`
guesses the structure from the first and last key of each row, and accepts a guess only if every entry agrees. Masks
without known structure are stored as bits, eight keys to a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...checks import check_broadcast, check_int, check_tensor
from ...ops.terms.biases import Added, Bias, Clipped, Relative
from ...ops.terms.coordinates import Coordinates, Point, look_up
from ...ops.terms.masks import Causal, Documents, Padding, Prefix, Window
from ...ops.terms.masks.mask_algebra import Mask, conjuncts
from ...ops.terms.term import term

if TYPE_CHECKING:
    from ...ops.shape import Sizes

ENTRIES, ENTRIES_ON_GPU = 2**22, 2**24  # mask elements inspected per block
BYTES_ON_GPU = 2**28  # the same if an element takes a byte: few blocks, since each takes the host as long as a kernel


@dataclass(frozen=True, eq=False)
class Edges:
    """The first and last visible key of each row of a mask, and the keys that any row sees."""

    first: Tensor  # b i: first visible key of each row
    last: Tensor  # b i: last visible key of each row
    some: Tensor  # b i: True if the row sees any key
    keep: Tensor  # b j: True if any row sees the key
    everything: bool  # True if every row sees every key
    unbroken: bool = False  # True if every row sees all keys from the first to the last, and at least one

    def distance(self, key: Tensor) -> Tensor:
        """Return key - row for the rows that see a key."""
        return (key - torch.arange(key.shape[1], device=key.device))[self.some]


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix `b|1 h|1 i j` that is computed a block of rows at a time."""

    shape: tuple[int, int, int, int]
    block: Callable[[int, int], Tensor]
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of a tensor of four dims."""
        for dim in (0, 1):
            x = x.narrow(dim, 0, 1) if x.shape[dim] > 1 and x.stride(dim) == 0 else x
        b, h, i, j = x.shape
        return cls((b, h, i, j), lambda start, stop: x[:, :, start:stop], x.device)

    def merge_equal_dims(self) -> Rows:
        """Return the matrix with equal batch rows merged into one, and equal heads likewise."""
        b, h, i, j = self.shape
        one_b = b > 1 and all(torch.equal(part, part[:1].expand_as(part)) for _, part in self.blocks())
        one_h = h > 1 and all(torch.equal(part, part[:, :1].expand_as(part)) for _, part in self.blocks())
        batch, heads = slice(0, 1 if one_b else b), slice(0, 1 if one_h else h)

        def block(start: int, stop: int) -> Tensor:
            return self.block(start, stop)[batch, heads]

        return Rows((batch.stop, heads.stop, i, j), block, self.device)

    def blocks(self, *, on_gpu: int = ENTRIES_ON_GPU) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row of each block, and the block."""
        b, h, i, j = self.shape
        step = max(1, (on_gpu if self.device.type == "cuda" else ENTRIES) // max(1, b * h * j))
        for start in range(0, i, step):
            yield start, self.block(start, min(start + step, i))

    def edges(self) -> Edges:
        """Return the edges of a boolean mask without heads."""
        b, _, _, j = self.shape
        keep = torch.zeros(b, j, dtype=torch.bool, device=self.device)
        first, count, runs = [], [], []
        for _, seen in self.blocks(on_gpu=BYTES_ON_GPU):
            whole = seen[:, 0]
            keep |= whole.any(1)
            count.append(whole.sum(2))
            first.append(whole.view(torch.uint8).argmax(2))
            runs.append((whole[..., 1:] > whole[..., :-1]).sum(2) + whole[..., 0])
        begin, number, several = torch.cat(first, 1), torch.cat(count, 1), torch.cat(runs, 1)
        some = number > 0
        everything, unbroken = torch.stack([(number == j).all(), (several == 1).all()]).tolist()
        if unbroken:
            end = begin + number - 1
        else:
            ends = (seen[:, 0].flip(2).view(torch.uint8).argmax(2) for _, seen in self.blocks(on_gpu=BYTES_ON_GPU))
            end = j - 1 - torch.cat([*ends], 1)
        return Edges(begin, end, some, keep, everything, unbroken)

    def are_those_of(self, mask: Mask, offset: int) -> bool:
        """True if a mask term agrees with every entry of a boolean mask without heads."""
        b, _, _, j = self.shape
        batch = torch.arange(b, device=self.device).view(-1, 1, 1, 1)
        head, keys = torch.zeros_like(batch[:1]), torch.arange(j, device=self.device)
        for start, seen in self.blocks():
            row = torch.arange(start, start + seen.shape[2], device=self.device)[:, None]
            if not torch.equal(mask.over(Point(batch, head, row, keys, offset)).expand_as(seen), seen):
                return False
        return True


@term
class Packed(Mask):
    """keep[..., row, j], eight keys to a byte: any pattern at an eighth of the memory of `Dense`."""

    bits: Tensor  # b|1 h|1 i bytes
    keys: int

    @classmethod
    def of(cls, rows: Rows) -> Packed:
        """The bits of a mask."""
        b, h, i, j = rows.shape
        bits = torch.zeros(b, h, i, -(-j // 8), dtype=torch.uint8, device=rows.device)
        value = 2 ** torch.arange(8, dtype=torch.uint8, device=rows.device)
        for start, seen in rows.blocks():
            bytes_ = torch.nn.functional.pad(seen.to(torch.uint8), (0, -j % 8)).unflatten(-1, (-1, 8))
            bits[:, :, start : start + seen.shape[2]] = (bytes_ * value).sum(-1, dtype=torch.uint8)
        return cls(bits, j)

    def __post_init__(self) -> None:
        check_tensor("Packed bits", self.bits)
        if self.bits.dtype != torch.uint8 or self.bits.ndim != 4:
            shape = tuple(self.bits.shape)
            raise TypeError(f"Packed bits must be uint8 with dims b h i bytes, got {self.bits.dtype} of shape {shape}")
        check_int("Packed keys", self.keys)

    def check(self, sizes: Sizes) -> None:
        if self.keys != sizes.j:
            raise ValueError(f"Packed must have a bit for each of the keys, got {self.keys} for j={sizes.j}")
        dims = {"b": sizes.b, "h": sizes.h, "i": sizes.i, "j/8": -(-sizes.j // 8)}
        check_broadcast("Packed bits", self.bits, dims)

    def over(self, at: Coordinates) -> Tensor:
        return (look_up(self.bits, at.b, at.h, at.row, at.j // 8) >> (at.j % 8).to(torch.uint8)) & 1 == 1

    def _drawing_size(self) -> tuple[int, int]:
        return min(self.bits.shape[2], 32), min(self.keys, 32)


def recognize(rows: Rows, *, offset: int | None = None) -> tuple[Mask | None, int]:
    """Return the term of a boolean mask, None if it hides nothing, and the position of its first query.

    >>> keep = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril().triu(-2)
    >>> recognize(Rows.of(keep))
    (Causal() & Window(3), 0)

    `offset` is the position of the first query if the caller knows it; otherwise a causal mask shows it.
    """
    rows = rows.merge_equal_dims()
    _, h, i, j = rows.shape
    given = j - i if offset is None else offset
    if not (i and j) or h > 1:
        return Packed.of(rows) if i and j else None, given
    edges = rows.edges()
    if edges.everything:
        return None, given
    padding = None if bool(edges.keep.all()) else _padding(edges.keep)
    if padding is not None and _agree(rows, edges, padding, given):
        return padding, given
    for mask, at in _guesses(edges, rows, offset):
        for guess in (mask,) if padding is None else (mask, mask & padding):
            if _agree(rows, edges, guess, at):
                return guess, at
    return Packed.of(rows), given


def _agree(rows: Rows, edges: Edges, mask: Mask, offset: int) -> bool:
    """True if a mask term agrees with every entry. Two unbroken runs of keys agree if they do at both of their ends."""
    if not (edges.unbroken and all(map(_sees_unbroken_runs, conjuncts(mask)))):
        return rows.are_those_of(mask, offset)
    b, _, i, j = rows.shape
    first, last = edges.first[:, None, :, None], edges.last[:, None, :, None]
    keys = torch.cat([first - 1, first, last, last + 1], 3)  # b 1 i 4
    batch = torch.arange(b, device=rows.device).view(-1, 1, 1, 1)
    row = torch.arange(i, device=rows.device)[:, None]
    seen = mask.over(Point(batch, torch.zeros_like(batch[:1]), row, keys.clamp(0, j - 1), offset)).expand_as(keys)
    expected = torch.tensor([False, True, True, False], device=rows.device)
    return bool(((seen == expected) | (keys < 0) | (keys >= j)).all())


def _sees_unbroken_runs(mask: Mask) -> bool:
    """True for masks in which each row sees all keys between its first and its last."""
    return isinstance(mask, (Causal, Window)) or (isinstance(mask, Padding) and isinstance(mask.keys, tuple))


def recognize_bias(rows: Rows, *, seen: Rows | None = None, offset: int) -> Bias | None:
    """Return the bias term of numbers that are added to the scores: `Relative` if they depend on the distance alone.

    Entries that `seen` hides do not matter. Returns None if all numbers are 0.
    """
    rows = rows.merge_equal_dims()
    b, _, i, j = rows.shape
    if not any(bool(part.any()) for _, part in rows.blocks()):
        return None
    if b == 1 and i > 1 and j > 1 and (relative := _by_distance(rows, seen, offset)) is not None:
        return relative
    return Added(torch.cat([part for _, part in rows.blocks()], 2))


def _guesses(edges: Edges, rows: Rows, offset: int | None) -> Iterator[tuple[Mask, int]]:
    """Yield candidate masks without padding, and the position of the first query; the simplest first."""
    _, _, i, j = rows.shape
    if not bool(edges.some.any()):
        return
    given = j - i if offset is None else offset
    ahead, behind = int(edges.distance(edges.last).max()), int(edges.distance(edges.first).min())
    # Keys behind the last query are unused slots of a static cache; then the diagonal shows where queries are.
    if ahead == given or (offset is None and 0 <= ahead < given):
        yield Causal(), ahead
        yield Causal() & Window(ahead - behind + 1), ahead
    before, after = given - behind, ahead - given
    if before >= 0 and after >= 0:
        yield Window(before + 1) if before == after else Window(before=before, after=after), given
    if i == j and given == 0:
        ids = torch.where(edges.some, edges.first, -1)
        documents = Documents(ids[0] if len(ids) == 1 else ids)
        yield Causal() & documents, 0
        yield documents, 0
        ends = edges.last[:, 0] + 1
        yield Causal() | Prefix(int(ends[0]) if len(ends) == 1 else ends), 0


def _padding(keep: Tensor) -> Padding:
    """Return padding by lengths if it is on the right, else by a boolean per key."""
    lengths = keep.sum(1)
    right = torch.equal(keep, torch.arange(keep.shape[1], device=keep.device) < lengths[:, None])
    if not right:
        return Padding(keep)
    padding = Padding(tuple(lengths.tolist()))
    padding.keys_on(keep.device)  # the device has nothing to do now; later, a copy would wait for all layers
    return padding


def _by_distance(rows: Rows, seen: Rows | None, offset: int) -> Relative | None:
    """Return one number for each head and distance, or None if the numbers depend on more."""
    _, h, i, j = rows.shape
    reach = max(abs(i - 1 + offset), abs(j - 1 - offset))
    table: Tensor | None = None
    keys = torch.arange(j, device=rows.device)

    def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start, values in rows.blocks():
            n = values.shape[2]
            row = torch.arange(start, start + n, device=rows.device)[:, None]
            shown = None if seen is None else seen.block(start, start + n)
            matters = torch.ones(1, 1, n, j, dtype=torch.bool, device=rows.device) if shown is None else shown
            # An entry that any batch row or head sees has to match; entries that are hidden from all may differ.
            yield values[0], matters.any(0).any(0), keys - row - offset + reach

    for values, matters, bucket in parts():
        table = values.new_zeros(h, 2 * reach + 1) if table is None else table
        table[:, bucket[matters]] = values[:, matters]
    assert table is not None
    for values, matters, bucket in parts():
        if not torch.equal(table[:, bucket[matters]], values[:, matters]):
            return None
    return Relative(Clipped(reach), table=table)
