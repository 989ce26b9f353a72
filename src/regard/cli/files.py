"""Input files, checked when a command reads them, and output files, checked before the work begins."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..atomic_files import check_parent_folder
from ..data import JoinedRows, Lines, Pair, Question, Rows, pairs_jsonl, pairs_tsv, parallel, questions
from ..data.joined_rows import as_paths, join_rows
from ..lens.tape.archive import is_tape
from ..train import ResourceError
from ..train.dataclass_json import check_types

Files = str | tuple[str, ...]  # one file, or several that are read one after the other
Header = Literal["auto", "yes", "no"]
HEADER = "Whether a table begins with a header line, if its columns are given by number; auto recognizes usual names."
IS_HEADER: dict[Header, bool | None] = {"auto": None, "yes": True, "no": False}
OVERWRITABLE = (".png", ".html", ".htm")  # files that no command reads as data


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """Parallel text: two files with matching lines, or one file of two columns."""

    source: Annotated[Files | None, "File of source sentences, one per line; may be repeated."] = None
    target: Annotated[Files | None, "File of target sentences, line by line as in --source; may be repeated."] = None
    pairs: Annotated[
        Files | None, "Source and target in one file: columns of a tab-separated or .csv file; may be repeated."
    ] = None
    source_column: Annotated[str, "Column of the sources in --pairs: a number from 0, or a name in its header."] = "0"
    target_column: Annotated[str, "Column of the targets in --pairs."] = "1"
    header: Annotated[Header, HEADER] = "auto"

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def files(self) -> list[str]:
        """The names of all files."""
        given = (self.source, self.target, self.pairs)
        return [str(path) for files in given if files is not None for path in as_paths(files)]

    def read(self, *, prefix: str = "") -> Rows[Pair] | JoinedRows[Pair]:
        """Return the pairs, with every line checked; `prefix` is the prefix of the flags in error messages."""
        both = self.source is not None and self.target is not None
        if both == (self.pairs is not None) or (self.source is None) != (self.target is None):
            raise ValueError(f"give --{prefix}source and --{prefix}target, or --{prefix}pairs")
        if self.pairs is not None:
            rows = read_table(self.pairs, self.source_column, self.target_column, self.header)
        else:
            rows = parallel(self.source or (), self.target or ())
        len(rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class SummaryFiles:
    """Documents and their summaries: two files with matching lines, or one file of both."""

    documents: Annotated[Files | None, "File of documents, one per line; may be repeated."] = None
    summaries: Annotated[Files | None, "File of summaries, line by line as in --documents; may be repeated."] = None
    pairs: Annotated[
        Files | None, "Document and summary in one file: columns of a tab-separated or .csv file; may be repeated."
    ] = None
    jsonl: Annotated[Files | None, "Document and summary in one file: one JSON object per line; may be repeated."] = (
        None
    )
    document_column: Annotated[str, "Column of the documents in --pairs: a number from 0, or a name."] = "0"
    summary_column: Annotated[str, "Column of the summaries in --pairs."] = "1"
    header: Annotated[Header, HEADER] = "auto"
    document_field: Annotated[str, "Field of the document in a line of JSON."] = "document"
    summary_field: Annotated[str, "Field of the summary in a line of JSON."] = "summary"

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def files(self) -> list[str]:
        """The names of all files."""
        given = (self.documents, self.summaries, self.pairs, self.jsonl)
        return [str(path) for files in given if files is not None for path in as_paths(files)]

    def read(self, *, prefix: str = "") -> Rows[Pair] | JoinedRows[Pair]:
        """Return the pairs, with every line checked; `prefix` is the prefix of the flags in error messages."""
        given = (self.documents is not None, self.summaries is not None, self.pairs is not None, self.jsonl is not None)
        if given == (True, True, False, False):
            rows = parallel(self.documents or (), self.summaries or ())
        elif given == (False, False, True, False):
            rows = read_table(self.pairs or (), self.document_column, self.summary_column, self.header)
        elif given == (False, False, False, True):
            rows = pairs_jsonl(self.jsonl or (), source=self.document_field, target=self.summary_field)
        else:
            raise ValueError(
                f"give --{prefix}documents and --{prefix}summaries, or --{prefix}pairs, or --{prefix}jsonl"
            )
        len(rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file of plain text, or several."""

    text: Annotated[Files | None, "File of plain text, read line by line; may be repeated."] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Lines | JoinedRows[str]:
        """Return the lines, with their encoding checked."""
        if self.text is None:
            raise ValueError(f"--{prefix}text is missing; give a file of plain text")
        lines = join_rows([Lines(path) for path in as_paths(self.text)])
        len(lines)
        return lines


@dataclass(frozen=True, kw_only=True)
class QuestionFile:
    """A file of questions, their documents and their answers, or several."""

    data: Annotated[
        Files | None, "File of questions with documents and answers: JSON in the format of SQuAD; may be repeated."
    ] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> list[Question]:
        """Return the questions, with every answer checked against its document."""
        if self.data is None:
            raise ValueError(f"--{prefix}data is missing; give a JSON file in the format of SQuAD")
        found = [question for path in as_paths(self.data) for question in questions(path)]
        if twice := [id for id, count in Counter(one.id for one in found).items() if count > 1]:
            raise ValueError(f"the id {twice[0]!r} is in more than one file of --{prefix}data; give unique ids")
        return found


def as_column(name: str) -> int | str:
    """Return a column as its number, or as its name in the header."""
    return int(name) if name.isdecimal() else name


def read_table(files: Sequence[str] | str, source: str, target: str, header: Header) -> Rows[Pair] | JoinedRows[Pair]:
    """Read two columns of tab-separated or `.csv` files."""
    return pairs_tsv(files, source=as_column(source), target=as_column(target), header=IS_HEADER[header])


def check_writable(path: Path | None, *read: Path | str | None, flag: str = "", ends: Sequence[str] = ()) -> None:
    """Raise unless the file can be written; commands call this before they compute its content.

    The path must not be an input: a file in `read`, standard input, or anything inside a folder in `read`, except
    pictures, pages and captures, which may be overwritten. If `ends` is given, the path must end in one of them;
    `flag` is the name of its flag.
    """
    if path is None:
        return
    try:
        check_parent_folder(path)
    except PermissionError as error:
        raise ResourceError(str(error)) from None
    if ends and path.suffix not in ends:
        raise ValueError(f"{flag} must end in {' or '.join(ends)}, got {path}")
    if not path.exists():
        return
    for source in (Path(name) for name in read if name is not None):
        if source.exists() and path.samefile(source):
            raise ValueError(f"{path} is an input of this command and would be overwritten; name another file")
        # Check links on both sides: a link inside the folder, and a link elsewhere to a file inside it.
        locations = path.resolve(), path.parent.resolve() / path.name
        is_inside = source.is_dir() and any(place.is_relative_to(source.resolve()) for place in locations)
        if is_inside and path.suffix not in OVERWRITABLE and not is_tape(path):
            raise ValueError(f"{path} exists already in {source}, an input of this command; name another file")
    if _is_standard_input(path):
        raise ValueError(f"{path} is the standard input of this command and would be overwritten; name another file")


def _is_standard_input(path: Path) -> bool:
    """Return whether the file is the standard input."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdin.fileno()))
    except (OSError, ValueError, AttributeError):  # standard input is closed or not a file
        return False
