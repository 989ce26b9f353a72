"""Rows: one example per line, from one file or from several parallel files."""

from __future__ import annotations

import csv
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from .errors import DataError, DataWarning
from .lines import Lines
from .text import check_text

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Streamable(Protocol[T_co]):
    """Rows that can be iterated and name their places."""

    def __iter__(self) -> Iterator[T_co]: ...
    def where(self, number: int, /) -> str: ...


class TextRows(Generic[T_co]):
    """`parse(line of file 1, line of file 2, ...)` for every line: `len`, index, iteration.

    `parse` raises `ValueError` for a bad line; the error then names file and line. With `header` the first line is
    skipped. The first `len` or index reads everything once and raises on the first bad line.
    """

    def __init__(self, *files: Lines, parse: Callable[..., T_co], header: bool = False) -> None:
        self.files = files
        self._parse = parse
        self._skip = int(header)
        self._checked = False

    def __len__(self) -> int:
        if not self._checked:
            for _ in self:
                pass
            if isinstance(self._parse, Columns):
                self._parse.warn_extra_cells(self.files[0], skip=self._skip)
            self._checked = True
        return len(self.files[0]) - self._skip

    def __getitem__(self, number: int) -> T_co:
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no row {number}: there are {len(self)}, counted from 0")
        number = number % len(self) + self._skip
        return self._row(number, *(file[number] for file in self.files))

    def __iter__(self) -> Iterator[T_co]:
        count = 0
        for count, texts in enumerate(zip_longest(*self.files), 1):
            if None in texts:
                raise self._unequal()
            if count > self._skip:
                yield self._row(count - 1, *texts)
        if count <= self._skip:
            raise self._empty()

    def stream(self) -> Stream[T_co]:
        """Return the same rows for iteration only, without an index: a row is checked when it is read."""
        return Stream(self)

    def where(self, number: int) -> str:
        """Return the file and line of a row, in the first file if there are several."""
        return self.files[0].where(number + self._skip)

    def error(self, number: int, problem: str, *, hint: str | None = None) -> DataError:
        """Return an error about a row."""
        return DataError(problem, file=self.files[0].path, line=number + self._skip + 1, hint=hint)

    def extra_columns(self) -> list[bool]:
        """Return for each row of a table whether its line has more columns than most; raise for other files."""
        if not isinstance(self._parse, Columns):
            raise ValueError(f"{self.files[0].path} is not a table, so its lines have no columns to count")
        counts = self._parse.count_cells(self.files[0], skip=self._skip)
        usual = Counter(counts).most_common(1)[0][0]
        return [count > usual for count in counts]

    def __repr__(self) -> str:
        return f"TextRows({', '.join(str(file.path) for file in self.files)})"

    def _row(self, number: int, *texts: str) -> T_co:
        try:
            return self._parse(*texts)
        except DataError:
            raise
        except ValueError as error:
            raise DataError(str(error), file=self.files[0].path, line=number + 1) from error

    def _unequal(self) -> DataError:
        longest, shortest = max(self.files, key=len), min(self.files, key=len)
        return DataError(
            f"has {len(longest):,} lines but {shortest.path} has {len(shortest):,}",
            file=longest.path,
            line=len(shortest) + 1,
            hint="the files must match line by line",
        )

    def _empty(self) -> DataError:
        return DataError("holds no examples", file=self.files[0].path, hint="expected one per line")


class Stream(Generic[T_co]):
    """Rows for iteration only: for text too large to index."""

    def __init__(self, rows: Streamable[T_co]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._rows)

    def where(self, number: int) -> str:
        """Return the file and line of a row."""
        return self._rows.where(number)


@dataclass(frozen=True)
class Columns(Generic[T]):
    """Parser of separated lines: passes the columns at `places` to `make`.

    Between tabs nothing is quoted; between commas a cell may be, as `"a, b"`, if it ends on its line.
    """

    places: tuple[int, ...]
    make: Callable[..., T]
    separator: str = "\t"
    named: bool = False

    def __call__(self, line: str) -> T:
        cells = split_cells(line, self.separator)
        if len(cells) <= max(self.places):
            what = "tabs" if self.separator == "\t" else "commas"
            raise ValueError(
                f"expected at least {max(self.places) + 1} columns, got {len(cells)}; separate them by {what}"
            )
        return self.make(*(cells[place] for place in self.places))

    def count_cells(self, file: Lines, *, skip: int) -> list[int]:
        """Return the number of cells of each line."""
        return [len(split_cells(line, self.separator)) for line in islice(file, skip, None)]

    def warn_extra_cells(self, file: Lines, *, skip: int) -> None:
        """Warn if columns given by number leave cells unread: of a few lines, or beyond the first columns of all."""
        if self.named:
            return
        counts = Counter(self.count_cells(file, skip=skip))
        least, most = min(counts), max(counts)
        if least == most and (most == len(self.places) or set(self.places) != set(range(len(self.places)))):
            return
        read = " and ".join(map(str, sorted(self.places)))
        if least == most:
            found = f"has {most} columns, and only columns {read} are read"
        else:
            usual = counts.most_common(1)[0][0]
            odd = sum(count for cells, count in counts.items() if cells != usual)
            found = (
                f"has {usual} columns, but {odd:,} of {counts.total():,} lines have more or fewer, up to {most}; only "
                f"columns {read} are read, so a text with a separator in it is cut there"
            )
        warnings.warn(f"{file.path} {found}", DataWarning, stacklevel=3)


@dataclass(frozen=True)
class Fields(Generic[T]):
    """Parser of JSON lines: passes the text fields `names` to `make`."""

    names: tuple[str, ...]
    make: Callable[..., T]

    def __call__(self, line: str) -> T:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected one JSON object per line ({error})") from error
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        for name in self.names:
            if not isinstance(record.get(name), str):
                raise ValueError(
                    f"expected text in the field {name!r}; the line has {', '.join(record) or 'no fields'}"
                )
            check_text(record[name], f"the field {name!r}")
        return self.make(*(record[name] for name in self.names))


def split_cells(line: str, separator: str) -> list[str]:
    """Split a line at its separator."""
    if separator == "\t":
        return line.split("\t")
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [""])
    except csv.Error as error:
        raise ValueError(f"not a line of comma-separated cells ({error}); a quoted cell must end on its line") from None


def separator_of(path: str | Path) -> str:
    """Return the separator of a file: a comma for `.csv`, also if it is compressed, otherwise a tab."""
    return "," if ".csv" in Path(path).suffixes[-2:] else "\t"


def columns(path: str | Path, *wanted: int | str) -> tuple[Lines, tuple[int, ...], bool]:
    """Return the file, the places of columns given by number or by name, and whether there is a header.

    >>> path = getfixture("tmp_path") / "a.tsv"
    >>> _ = path.write_text("label\\tsentence\\n1\\tgood\\n")
    >>> columns(path, "sentence", "label")[1:], columns(path, 0, 1)[1:]
    (((1, 0), True), ((0, 1), False))
    """
    file = Lines(path)
    named = [name for name in wanted if isinstance(name, str)]
    if named and len(named) != len(wanted):
        raise ValueError(f"columns must be all names or all numbers, got {wanted}")
    if not named:
        for place in wanted:
            if isinstance(place, bool) or not isinstance(place, int) or place < 0:
                raise ValueError(f"a column must be a name or a number from 0, got {place!r}")
        return file, tuple(int(place) for place in wanted), False
    first = next(iter(file), None)
    try:
        header = [] if first is None else split_cells(first, separator_of(path))
    except ValueError as error:
        raise DataError(str(error), file=path, line=1) from error
    for name in named:
        if name not in header:
            raise DataError(
                f"the header has no column {name!r}, only {', '.join(header)}"
                if first
                else f"expected a header with the column {name!r}, got an empty {'file' if first is None else 'line'}",
                file=path,
                line=1,
                hint="name an existing column, or give columns by number if there is no header",
            )
        if (count := header.count(name)) > 1:
            raise DataError(
                f"the header has {count} columns {name!r}", file=path, line=1, hint="give each its own name"
            )
    return file, tuple(header.index(name) for name in named), True
