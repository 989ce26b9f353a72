"""Pairs of texts: sentence and translation, document and summary."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .lines import Lines
from .tabular import Columns, Fields, TextRows, columns


class Pair(NamedTuple):
    """An input text and its output text."""

    source: str
    target: str


def parallel(source: str | Path, target: str | Path) -> TextRows[Pair]:
    """Read two files that match line by line: parallel text, or documents and their summaries.

    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "a.de").write_text("ein Haus\\nein Hund\\n"), (folder / "a.en").write_text("a house\\na dog\\n")
    >>> parallel(folder / "a.de", folder / "a.en")[1]
    Pair(source='ein Hund', target='a dog')
    """
    return TextRows(Lines(source), Lines(target), parse=Pair)


def pairs_tsv(path: str | Path, *, source: int | str = 0, target: int | str = 1) -> TextRows[Pair]:
    """Read two columns of a tab-separated file, by number, or by name if the first line is a header.

    There is no quoting.
    """
    file, places, header = columns(path, source, target)
    return TextRows(file, parse=Columns(places, Pair), header=header)


def pairs_jsonl(path: str | Path, *, source: str, target: str) -> TextRows[Pair]:
    """Read two text fields of a file with one JSON object per line, such as `source="body", target="subject"`."""
    return TextRows(Lines(path), parse=Fields((source, target), Pair))
