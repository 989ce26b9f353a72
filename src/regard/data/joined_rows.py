"""Rows of several files as one data set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from .errors import DataError
from .tabular import Stream, TextRows

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R", bound="RowsOfFile[Any]")
Paths = str | Path | Sequence[str | Path]


class RowsOfFile(Protocol[T_co]):
    """Rows with their places in a file, such as `Lines` and `TextRows`."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> T_co: ...
    def __iter__(self) -> Iterator[T_co]: ...
    def where(self, number: int, /) -> str: ...
    def error(self, number: int, problem: str, /, *, hint: str | None = None) -> DataError: ...


class JoinedRows(Generic[T_co]):
    """The rows of several files, one file after the other: `len`, index, iteration.

    >>> from regard.data import Lines
    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "a").write_text("one\\ntwo\\n"), (folder / "b").write_text("three\\n")
    >>> rows = JoinedRows([Lines(folder / "a"), Lines(folder / "b")])
    >>> len(rows), rows[2], list(rows)
    (3, 'three', ['one', 'two', 'three'])
    """

    def __init__(self, parts: Sequence[RowsOfFile[T_co]]) -> None:
        self.parts = parts
        self._ends: list[int] | None = None

    def __len__(self) -> int:
        return self._index_parts()[-1]

    def __getitem__(self, number: int) -> T_co:
        part, place = self._place(number)
        return part[place]

    def __iter__(self) -> Iterator[T_co]:
        for part in self.parts:
            yield from part

    def where(self, number: int) -> str:
        """Return the file and line of a row."""
        part, place = self._place(number)
        return part.where(place)

    def error(self, number: int, problem: str, *, hint: str | None = None) -> DataError:
        """Return an error about a row."""
        part, place = self._place(number)
        return part.error(place, problem, hint=hint)

    def extra_columns(self) -> list[bool]:
        """Return for each row whether its line has more columns than most of its file."""
        found: list[bool] = []
        for part in self.parts:
            if not isinstance(part, TextRows):
                raise ValueError(f"{part!r} is not a table, so its lines have no columns to count")
            found += part.extra_columns()
        return found

    def stream(self) -> Stream[T_co]:
        """Return the same rows for iteration only, without an index."""
        return Stream(self)

    def __repr__(self) -> str:
        return f"JoinedRows({list(self.parts)!r})"

    def _index_parts(self) -> list[int]:
        if self._ends is None:
            self._ends = list(accumulate(map(len, self.parts)))
        return self._ends

    def _place(self, number: int) -> tuple[RowsOfFile[T_co], int]:
        ends = self._index_parts()
        if not -ends[-1] <= number < ends[-1]:
            raise IndexError(f"there is no row {number}: there are {ends[-1]}, counted from 0")
        number %= ends[-1]
        part = bisect_right(ends, number)
        return self.parts[part], number - (ends[part - 1] if part else 0)


def join_rows(parts: Sequence[R]) -> R | JoinedRows[Any]:
    """Return the rows of all parts, or the only part itself."""
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def as_paths(paths: Paths) -> list[Path]:
    """Return one path or several as a list; raise if there is none."""
    found = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not found:
        raise ValueError("give at least one file, got none")
    return found


def matching_paths(first: Paths, second: Paths) -> list[tuple[Path, Path]]:
    """Return the files of two sides in pairs; raise if their numbers differ."""
    one, other = as_paths(first), as_paths(second)
    if len(one) != len(other):
        raise ValueError(
            f"files must come in pairs that match line by line, got {len(one)} ({', '.join(map(str, one))}) and "
            f"{len(other)} ({', '.join(map(str, other))})"
        )
    return list(zip(one, other, strict=True))
