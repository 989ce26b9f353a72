"""Examples as token ids, all in memory at 4 bytes per token, and their batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data.buckets import buckets
from ..data.padding import collate
from ..train.batches import move_to_device

T = TypeVar("T")
Ids = np.ndarray[Any, np.dtype[np.int32]]
EXAMPLES_PER_CHUNK = 4096


class EncodedExamples:
    """Named rows of ids for each example, such as `encoded[7]["source"]`, and their `lengths` by name.

    >>> encoded = EncodedExamples(["ab", "c"], lambda texts: {"ids": [[ord(c) for c in text] for text in texts]})
    >>> encoded[0]["ids"].tolist(), encoded.lengths["ids"].tolist()
    ([97, 98], [2, 1])

    `encode` takes many examples at a time. Errors in examples are therefore raised here, before a run begins, and no
    epoch encodes text. `where(number)` is the origin of an example, such as a file and line.
    """

    def __init__(
        self, examples: Iterable[T], encode: Callable[[Sequence[T]], Mapping[str, Sequence[Sequence[int] | Ids]]]
    ) -> None:
        self.where: Callable[[int], str] = getattr(examples, "where", "example {}".format)
        ids: dict[str, list[Ids]] = {}
        lengths: dict[str, list[int]] = {}
        remaining = iter(examples)
        while chunk := list(islice(remaining, EXAMPLES_PER_CHUNK)):
            for name, rows in encode(chunk).items():
                ids.setdefault(name, []).extend(np.asarray(row, np.int32) for row in rows)
                lengths.setdefault(name, []).extend(map(len, rows))
        self.lengths = {name: np.array(counts) for name, counts in lengths.items()}
        self._ids = {name: np.concatenate(parts) for name, parts in ids.items()}
        self._ends = {name: np.concatenate([[0], np.cumsum(counts)]) for name, counts in lengths.items()}
        self._count = len(next(iter(self.lengths.values()), ()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Ids]:
        if not -self._count <= number < self._count:
            raise IndexError(f"there is no example {number}: the dataset has {self._count}")
        number %= self._count
        return {name: x[self._ends[name][number] : self._ends[name][number + 1]] for name, x in self._ids.items()}

    def fingerprint(self) -> str:
        """Return a fingerprint of all ids."""
        hashed = hashlib.sha256()
        for name, x in self._ids.items():
            hashed.update(f"{name} {len(x)}".encode())
            hashed.update(x.tobytes())
            hashed.update(self._ends[name].tobytes())
        return hashed.hexdigest()[:32]

    def batch(self, rows: Sequence[int], *, pad: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples: each field padded, `(b, n)`, and its lengths as `name_lengths`, `(b,)`."""
        chosen = [{name: x.astype(np.int64) for name, x in self[row].items()} for row in rows]
        return move_to_device(collate(chosen, pad), device)

    @property
    def longest(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The length of the longest row of each example."""
        return np.max(list(self.lengths.values()), axis=0)


def in_batches(
    examples: EncodedExamples, *, tokens: int, pad: Mapping[str, int], device: torch.device
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield the numbers and the batch of every example once, grouped by similar length.

    A batch has at most `tokens` tokens, rows x longest row; a longer example has a batch of its own.
    """
    lengths = list(zip(*(x.tolist() for x in examples.lengths.values()), strict=True))
    for rows in buckets(lengths, tokens=tokens):
        yield rows, examples.batch(rows, pad=pad, device=device)
