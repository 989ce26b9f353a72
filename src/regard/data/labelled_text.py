"""Labelled text: a class for every line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .lines import Lines
from .tabular import Columns, TextRows, columns
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

    def __init__(self, rows: TextRows[tuple[str, str]], *, classes: Sequence[str] | None = None) -> None:
        self._rows = rows
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

    def where(self, number: int) -> str:
        """Return the file and line of an example."""
        return self._rows.where(number)


def labelled_tsv(
    path: str | Path, *, text: int | str = 1, label: int | str = 0, classes: Sequence[str] | None = None
) -> LabelledText:
    """Read two columns of a tab-separated file, by number, or by name if the first line is a header."""
    file, places, header = columns(path, text, label)
    return LabelledText(TextRows(file, parse=Columns(places, _check_label), header=header), classes=classes)


def labelled(texts: str | Path, labels: str | Path, *, classes: Sequence[str] | None = None) -> LabelledText:
    """Read two files that match line by line: texts, and the label of each."""
    return LabelledText(TextRows(Lines(texts), Lines(labels), parse=_check_label), classes=classes)


def _check_label(text: str, label: str) -> tuple[str, str]:
    if not label.strip():
        raise ValueError("the label is empty; expected the name of a class")
    return text, label.strip()
