"""Pairs of texts: sentence and translation, document and summary."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from .errors import DataWarning
from .joined_rows import JoinedRows, Paths, as_paths, join_rows, matching_paths
from .lines import Lines
from .table_header import is_pair_header
from .tabular import Columns, Fields, TextRows, columns, separator_of


class Pair(NamedTuple):
    """An input text and its output text."""

    source: str
    target: str


def parallel(source: Paths, target: Paths) -> TextRows[Pair] | JoinedRows[Pair]:
    """Read two files that match line by line, or several of each: parallel text, or documents and their summaries.

    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "a.de").write_text("ein Haus\\nein Hund\\n"), (folder / "a.en").write_text("a house\\na dog\\n")
    >>> parallel(folder / "a.de", folder / "a.en")[1]
    Pair(source='ein Hund', target='a dog')
    """
    return join_rows([TextRows(Lines(one), Lines(other), parse=Pair) for one, other in matching_paths(source, target)])


def pairs_tsv(
    path: Paths, *, source: int | str = 0, target: int | str = 1, header: bool | None = None
) -> TextRows[Pair] | JoinedRows[Pair]:
    """Read two columns of a tab-separated or `.csv` file, or of several, by number or by name.

    Columns by name need a header in the first line. By number, `header` says whether there is one; by default a first
    line such as `source <tab> target` or `de <tab> en` is one, which a `DataWarning` reports.
    """
    return join_rows([_pairs_of_table(one, source, target, header) for one in as_paths(path)])


def pairs_jsonl(path: Paths, *, source: str, target: str) -> TextRows[Pair] | JoinedRows[Pair]:
    """Read two text fields of lines with one JSON object each, such as `source="body", target="subject"`."""
    return join_rows([TextRows(Lines(one), parse=Fields((source, target), Pair)) for one in as_paths(path)])


def _pairs_of_table(path: Path, source: int | str, target: int | str, header: bool | None) -> TextRows[Pair]:
    file, places, named = columns(path, source, target)
    parse = Columns(places, Pair, separator_of(path), named)
    if not named and header is None:
        first = next(iter(TextRows(file, parse=parse)))
        if header := is_pair_header(*first):
            warnings.warn(
                f"{path} line 1 was read as a header, {first.source} and {first.target}; if it is an example, pass "
                "header=False (--header no)",
                DataWarning,
                stacklevel=3,
            )
    return TextRows(file, parse=parse, header=named or bool(header))
