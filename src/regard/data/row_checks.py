"""Rows that are probably mistakes: with an empty side, repeated, or in the training and the validation data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from .errors import DataError
from .joined_rows import RowsOfFile

T_co = TypeVar("T_co", covariant=True)
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Key = tuple[str, ...]  # the texts of a row, its input first


@dataclass(frozen=True, eq=False)
class RowChecks:
    """For each row, whether a side is blank, whether an earlier row is the same, and whether other data has its input.

    >>> checks = RowChecks.of([("a", "1"), ("b", ""), ("a", "1")], others=[("b", "2")])
    >>> checks.empty.tolist(), checks.repeated.tolist(), checks.shared.tolist(), checks.leaked.tolist()
    ([False, True, False], [False, False, True], [False, True, False], [True])

    `leaked` is about the other data: whether the input of each of its rows is among these rows.
    """

    empty: Mask
    repeated: Mask
    shared: Mask
    leaked: Mask

    @classmethod
    def of(cls, keys: Iterable[Key], *, others: Iterable[Key] = ()) -> RowChecks:
        """Check rows by their texts, which take 17 bytes of memory a row; `others` is the other data."""
        empty, whole, inputs = [], [], []
        for key in keys:
            empty.append(not all(text.strip() for text in key))
            whole.append(hash(key))
            inputs.append(hash(key[0]))
        hashes = np.array(whole, np.int64)
        repeated = np.ones(len(hashes), np.bool_)
        repeated[np.unique(hashes, return_index=True)[1]] = False
        other = np.fromiter((hash(key[0]) for key in others), np.int64)
        own = np.array(inputs, np.int64)
        return cls(np.array(empty, np.bool_), repeated, np.isin(own, other), np.isin(other, own))

    def lines(self, what: str, others: str) -> list[str]:
        """Return a line for each kind of mistake that occurs, with its count; `what` and `others` name the rows."""
        problems = (
            (self.empty, what, "have an empty text"),
            (self.repeated, what, "repeat an earlier one"),
            (self.leaked, others, "have an input that is also in the training data"),
        )
        return [f"{mask.sum():,} of {len(mask):,} {rows} {problem}" for mask, rows, problem in problems if mask.any()]


def pair_key(pair: Any) -> Key:
    """Return the texts of a pair."""
    return pair.source, pair.target


def label_key(example: Any) -> Key:
    """Return the text of a labelled example and its class."""
    return example.text, str(example.label)


class KeptRows(Generic[T_co]):
    """Some rows of a data set, by their numbers in ascending order: `len`, index, iteration, and places in files."""

    def __init__(self, rows: RowsOfFile[T_co], numbers: Numbers) -> None:
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> T_co:
        return self.rows[int(self.numbers[number])]

    def __iter__(self) -> Iterator[T_co]:
        kept = iter(self.numbers.tolist())
        following = next(kept, None)
        for number, row in enumerate(self.rows):
            if number == following:
                yield row
                following = next(kept, None)

    def where(self, number: int) -> str:
        """Return the file and line of a row."""
        return self.rows.where(int(self.numbers[number]))

    def error(self, number: int, problem: str, *, hint: str | None = None) -> DataError:
        """Return an error about a row."""
        return self.rows.error(int(self.numbers[number]), problem, hint=hint)


def numbers_to_keep(
    keys: Iterable[Key],
    *,
    empty: bool = False,
    duplicates: bool = False,
    others: Iterable[Key] = (),
    drop: Sequence[bool] | None = None,
) -> Numbers:
    """Return the numbers of the rows that are left without empty rows, repeated rows, and rows with inputs of `others`.

    >>> numbers_to_keep([("a", "1"), ("b", ""), ("a", "1"), ("c", "3")], empty=True, duplicates=True).tolist()
    [0, 3]

    `drop` marks other rows to leave out.
    """
    checks = RowChecks.of(keys, others=others)
    marked = checks.shared | (checks.empty & empty) | (checks.repeated & duplicates)
    kept = np.flatnonzero(~(marked if drop is None else marked | np.asarray(drop, np.bool_)))
    if not len(kept):
        raise DataError("no example is left after dropping", hint="leave out the flags that drop examples")
    return kept
