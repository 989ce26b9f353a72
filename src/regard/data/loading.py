"""Loading: read and encode examples chunk by chunk, here or in worker processes, in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .errors import DataError
from .padding import Example


@dataclass(frozen=True)
class Chunk:
    """The examples of a chunk with their numbers in the source; `count` is the total over all ranks."""

    number: int
    count: int
    examples: list[tuple[int, Example]]


class Chunks(IterableDataset[Chunk | DataError]):
    """The chunks of an epoch from `first` on, each in pieces; of n workers, each reads and encodes every n-th piece.

    With an order the source is indexed. Without, it is iterated, and the pieces of other workers are skipped without
    encoding. `share=(rank, ranks)` takes every ranks-th example of a piece.
    """

    def __init__(
        self,
        *,
        source: Any,
        encode: Callable[[Any], Mapping[str, Any]] | None,
        order: np.ndarray[Any, np.dtype[np.int64]] | None,
        size: int,
        pieces: int,
        first: int,
        share: tuple[int, int],
    ) -> None:
        self.source, self.encode, self.order = source, encode, order
        self.size, self.pieces, self.first, self.share = size, pieces, first, share

    def __iter__(self) -> Iterator[Chunk | DataError]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, ranks = self.share
        try:
            for turn, (number, piece) in enumerate(self._pieces()):
                if turn % workers == worker:
                    found = [(index, self._encode(index, example)) for index, example in piece[rank::ranks]]
                    yield Chunk(number, len(piece), found)
        except DataError as error:
            # Yielded, because an error raised in a worker arrives with a traceback as its message.
            yield error

    def _pieces(self) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        """Yield chunk number and piece: example numbers with their examples, None for an indexed source."""
        rest: Iterator[tuple[int, Any]]
        if self.order is None:
            rest = enumerate(self.source)
            deque(islice(rest, self.first * self.size), maxlen=0)
        else:
            rest = ((int(index), None) for index in self.order[self.first * self.size :])
        step = -(-self.size // self.pieces)
        for number in count(self.first):
            for start in range(0, self.size, step):
                piece = list(islice(rest, min(step, self.size - start)))
                if not piece:
                    return
                yield number, piece

    def _encode(self, index: int, example: Any) -> Example:
        if self.order is not None:
            example = self.source[index]
        return as_arrays(example if self.encode is None else self.encode(example))


def load_chunks(chunks: Chunks, workers: int) -> Iterator[Chunk]:
    """Yield complete chunks in order, loaded by this process or by `workers` processes."""
    found: Iterable[Chunk | DataError] = chunks
    if workers:
        # Its own generator: the default draws from the global one, once more in a resumed run.
        found = DataLoader(chunks, batch_size=None, num_workers=workers, generator=torch.Generator())
    pieces: list[Chunk] = []
    for piece in found:
        if isinstance(piece, DataError):
            raise piece
        pieces.append(piece)
        if sum(piece.count for piece in pieces) == chunks.size:
            yield join_pieces(pieces)
            pieces = []
    if pieces:
        yield join_pieces(pieces)


def join_pieces(pieces: list[Chunk]) -> Chunk:
    """Join the pieces of a chunk."""
    examples = [example for piece in pieces for example in piece.examples]
    return Chunk(pieces[0].number, sum(piece.count for piece in pieces), examples)


def as_arrays(values: Mapping[str, Any]) -> Example:
    """Convert fields to arrays: whole numbers to int64, Python floats to float32; other dtypes are kept."""
    if not isinstance(values, Mapping):
        raise TypeError(f"encode must return fields by name, got {type(values).__name__}; write {{'ids': ...}}")
    if "index" in values:
        raise ValueError("encode must not return a field 'index': batches hold the numbers of their examples there")
    fields = {}
    for name, value in values.items():
        if type(value) is np.ndarray:
            array = value
        else:
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        if isinstance(value, (list, tuple)) and not value:
            array = np.empty(0, np.int64)
        if array.dtype.kind not in "buif":
            raise TypeError(f"encode must return numbers, got {type(value).__name__} in the field {name!r}")
        if array.ndim <= 1 and array.dtype.kind in "ui":
            array = array.astype(np.int64)
        elif isinstance(value, (float, list, tuple)) and array.dtype.kind == "f":
            array = array.astype(np.float32)
        fields[name] = array
    for name in fields:
        if f"{name}_lengths" in fields and fields[name].ndim == 1:
            raise ValueError(
                f"encode must not return a field '{name}_lengths': batches hold the lengths of {name!r} there"
            )
    return fields
