"""Encoded: examples as ids, all of them in memory at 4 bytes a token, and the batches a model reads them in."""

from __future__ import annotations

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
    """Named rows of ids for each example: `encoded[7]["source"]`, and their `lengths` by name.

    >>> encoded = Encoded(["ab", "c"], lambda texts: {"ids": [[ord(letter) for letter in text] for text in texts]})
    >>> encoded[0]["ids"].tolist(), encoded.lengths["ids"].tolist()
    ([97, 98], [2, 1])

    `encode` is given many examples at once. What is wrong with an example therefore shows here, before a run begins,
    and no epoch spends time on text. `where(number)` says where an example came from.
    """

    def __init__(
        self, examples: Iterable[T], encode: Callable[[Sequence[T]], Mapping[str, Sequence[Sequence[int] | Ids]]]
    ) -> None:
        self.where: Callable[[int], str] = getattr(examples, "where", "example {}".format)
        ids: dict[str, list[Ids]] = {}
        lengths: dict[str, list[int]] = {}
        rest = iter(examples)
        while some := list(islice(rest, EXAMPLES_PER_CHUNK)):
            for name, rows in encode(some).items():
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
            raise IndexError(f"example {number} of {self._count}")
        number %= self._count
        return {name: x[self._ends[name][number] : self._ends[name][number + 1]] for name, x in self._ids.items()}

    def batch(self, rows: Sequence[int], *, pad: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """These examples side by side: each field padded, `(b, n)`, with `name_lengths`, `(b,)`."""
        chosen = [{name: x.astype(np.int64) for name, x in self[row].items()} for row in rows]
        return move_to_device(collate(chosen, pad), device)

    @property
    def longest(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The length of the longest row of each example."""
        return np.max(list(self.lengths.values()), axis=0)


def in_batches(
    examples: EncodedExamples, *, tokens: int, pad: Mapping[str, int], device: torch.device
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Every example once, those of like length together: their numbers, and the batch on a device.

    A batch costs at most `tokens`, rows times longest row; a longer example has one of its own.
    """
    lengths = list(zip(*(x.tolist() for x in examples.lengths.values()), strict=True))
    for rows in buckets(lengths, tokens=tokens):
        yield rows, examples.batch(rows, pad=pad, device=device)
