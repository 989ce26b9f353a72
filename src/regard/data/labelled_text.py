"""Labelled text: a class for every line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import DataError, DataWarning
from .joined_rows import JoinedRows, Paths, RowsOfFile, as_paths, join_rows, matching_paths
from .lines import Lines
from .row_checks import KeptRows, Numbers
from .table_header import is_label_header, is_swapped, may_be_label_header
from .tabular import Columns, TextRows, columns, separator_of
from .text import check_class_names


class Labelled(NamedTuple):
    """A text and the number of its class."""

    text: str
    label: int


class LabelledText:
    """Texts with their classes: `len`, index, iteration, and `classes`, the names in order.

    >>> path = getfixture("tmp_path") / "reviews.tsv"
    >>> _ = path.write_text("label\\tsentence\\nbad\\tno wit\\ngood\\tall heart\\n")
    >>> train = labelled_tsv(path, text="sentence", label="label")
    >>> train.classes, train[1]
    (('bad', 'good'), Labelled(text='all heart', label=1))

    Without `classes` they are the sorted labels of the file. Pass those of the training set to the test set, so that
    both number them alike; an unknown label then raises and names its line.
    """

    def __init__(self, rows: RowsOfFile[tuple[str, str]], *, classes: Sequence[str] | None = None) -> None:
        self._rows = rows
        len(rows)  # checks every line
        names = [name for _, name in rows]
        self.classes = tuple(sorted(set(names)) if classes is None else classes)
        check_class_names(classes)
        number = {name: n for n, name in enumerate(self.classes)}
        for n, name in enumerate(names):
            if name not in number:
                known = ", ".join(self.classes[:8]) + (", ..." if len(self.classes) > 8 else "")
                raise rows.error(n, f"unknown label {name!r}", hint=f"expected one of {known}")
        self.labels: np.ndarray[Any, np.dtype[np.int64]] = np.array([number[name] for name in names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Labelled:
        return Labelled(self._rows[number][0], int(self.labels[number]))

    def __iter__(self) -> Iterator[Labelled]:
        for (text, _), label in zip(self._rows, self.labels.tolist(), strict=True):
            yield Labelled(text, label)

    def extra_columns(self) -> list[bool]:
        """Return for each example whether its line has more columns than most."""
        if not isinstance(self._rows, (TextRows, JoinedRows)):
            raise ValueError("the examples are not read from a table, so their lines have no columns to count")
        return self._rows.extra_columns()

    def only(self, numbers: Numbers) -> LabelledText:
        """Return the examples with these numbers, in ascending order, with the same classes."""
        return LabelledText(KeptRows(self._rows, numbers), classes=self.classes)

    def where(self, number: int) -> str:
        """Return the file and line of an example."""
        return self._rows.where(number)


def labelled_tsv(
    path: Paths,
    *,
    text: int | str = 1,
    label: int | str = 0,
    header: bool | None = None,
    classes: Sequence[str] | None = None,
) -> LabelledText:
    """Read two columns of a tab-separated or `.csv` file, or of several, by number or by name.

    Columns by name need a header in the first line. By number, `header` says whether there is one; by default a first
    line such as `label <tab> sentence` is one, which a `DataWarning` reports. A first line that may be a header or an
    example raises.
    """
    rows = join_rows([_labels_of_table(one, text, label, header) for one in as_paths(path)])
    return LabelledText(rows, classes=classes)


def labelled(texts: Paths, labels: Paths, *, classes: Sequence[str] | None = None) -> LabelledText:
    """Read two files that match line by line, or several of each: texts, and the label of each."""
    pairs = matching_paths(texts, labels)
    rows = join_rows([TextRows(Lines(one), Lines(other), parse=_check_label) for one, other in pairs])
    return LabelledText(rows, classes=classes)


def _labels_of_table(path: Path, text: int | str, label: int | str, header: bool | None) -> TextRows[tuple[str, str]]:
    file, places, named = columns(path, text, label)
    parse = Columns(places, _check_label, separator_of(path), named)
    if not named and header is None:
        first = next(iter(TextRows(file, parse=parse)))
        labels = [name for _, name in TextRows(file, parse=parse)]
        if is_label_header(*first) and first[1] not in labels[1:]:
            if is_swapped(*first):
                raise DataError(
                    f"the header names column {places[0]}, read as texts, {first[0]!r}, and column {places[1]}, read "
                    f"as labels, {first[1]!r}",
                    file=path,
                    line=1,
                    hint=f"read them by name: text={first[1]!r} (--text-column {first[1]}) and label={first[0]!r} "
                    f"(--label-column {first[0]})",
                )
            header = True
            warnings.warn(
                f"{path} line 1 was read as a header, {first[1]} and {first[0]}; if it is an example, pass "
                "header=False (--header no)",
                DataWarning,
                stacklevel=3,
            )
        elif may_be_label_header(first[0], labels):
            raise DataError(
                f"the first line may be a header: no other line has the label {first[1]!r}",
                file=path,
                line=1,
                hint="pass header=True if it is one (--header yes), or header=False if it is an example (--header no)",
            )
    return TextRows(file, parse=parse, header=named or bool(header))


def _check_label(text: str, label: str) -> tuple[str, str]:
    if not label.strip():
        raise ValueError("the label is empty; expected the name of a class")
    return text, label.strip()
