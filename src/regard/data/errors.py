"""DataError: an error in a data file, with its place and the next step."""

from __future__ import annotations

from pathlib import Path


class DataWarning(UserWarning):
    """A property of a data file that is probably a mistake."""


class DataError(ValueError):
    """One line that names file, line, expectation and the next step.

    >>> str(DataError("expected 2 columns, got 1", file="pairs.tsv", line=7, hint="separate them by one tab"))
    'pairs.tsv line 7: expected 2 columns, got 1; separate them by one tab'
    """

    def __init__(
        self, problem: str, *, file: str | Path | None = None, line: int | None = None, hint: str | None = None
    ) -> None:
        self.file = None if file is None else str(file)
        self.line = line
        where = "" if file is None else f"{file}: " if line is None else f"{file} line {line}: "
        text = where + problem + (f"; {hint}" if hint else "")
        # Escape control characters: a hostile file must not control the terminal or break the line.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))
