"""The table of `tape.table()` without pandas: a dictionary of columns that prints as aligned text."""

from __future__ import annotations

import html
from typing import Any

FIRST, LAST = 20, 5  # rows that are printed of a long table


class MeasureTable(dict[str, list[Any]]):
    """Columns by name, each a list with a value for each row."""

    def __repr__(self) -> str:
        lines = [[str(name) for name in self], *([_format(value) for value in row] for row in self._rows())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        if self._hidden:
            text.insert(1 + FIRST, f"... {self._hidden} more rows ...")
        return "\n".join([*text, self._size])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        head = "".join(f"<th>{html.escape(str(name))}</th>" for name in self)
        rows = ["".join(f"<td>{html.escape(_format(value))}</td>" for value in row) for row in self._rows()]
        if self._hidden:
            rows.insert(FIRST, f'<td colspan="{len(self)}">... {self._hidden} more rows ...</td>')
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{self._size}</p>"

    @property
    def _count(self) -> int:
        return max((len(column) for column in self.values()), default=0)

    @property
    def _hidden(self) -> int:
        """The number of rows that are not printed."""
        return max(0, self._count - FIRST - LAST)

    @property
    def _size(self) -> str:
        return f"[{self._count} rows x {len(self)} columns; with pandas installed, this is a data frame]"

    def _rows(self) -> list[tuple[Any, ...]]:
        """The rows that are printed: the first and the last."""
        rows = list(zip(*self.values(), strict=True))
        return rows[:FIRST] + rows[-LAST:] if self._hidden else rows


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
