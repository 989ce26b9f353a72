"""Input files, checked when a command reads them, and output files, checked before the work begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..atomic_files import check_parent_folder
from ..data import Lines, Pair, Question, Rows, pairs_jsonl, pairs_tsv, parallel, questions
from ..lens.tape.archive import is_tape
from ..train.dataclass_json import check_types

OVERWRITABLE = (".png", ".html", ".htm")  # files that no command reads as data


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """Parallel text: two files with matching lines, or one file of two columns."""

    source: Annotated[str | None, "File of source sentences, one per line."] = None
    target: Annotated[str | None, "File of target sentences, line by line as in --source."] = None
    pairs: Annotated[str | None, "Source and target in one file: two columns separated by a tab."] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Rows[Pair]:
        """Return the pairs, with every line checked; `prefix` is the prefix of the flags in error messages."""
        both = self.source is not None and self.target is not None
        if both == (self.pairs is not None) or (self.source is None) != (self.target is None):
            raise ValueError(f"give --{prefix}source and --{prefix}target, or --{prefix}pairs")
        rows = pairs_tsv(self.pairs) if self.pairs is not None else parallel(str(self.source), str(self.target))
        len(rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class SummaryFiles:
    """Documents and their summaries: two files with matching lines, or one file of both."""

    documents: Annotated[str | None, "File of documents, one per line."] = None
    summaries: Annotated[str | None, "File of summaries, line by line as in --documents."] = None
    pairs: Annotated[str | None, "Document and summary in one file: two columns separated by a tab."] = None
    jsonl: Annotated[str | None, "Document and summary in one file: one JSON object per line."] = None
    document_field: Annotated[str, "Field of the document in a line of JSON."] = "document"
    summary_field: Annotated[str, "Field of the summary in a line of JSON."] = "summary"

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Rows[Pair]:
        """Return the pairs, with every line checked; `prefix` is the prefix of the flags in error messages."""
        given = (self.documents is not None, self.summaries is not None, self.pairs is not None, self.jsonl is not None)
        if given == (True, True, False, False):
            rows = parallel(str(self.documents), str(self.summaries))
        elif given == (False, False, True, False):
            rows = pairs_tsv(str(self.pairs))
        elif given == (False, False, False, True):
            rows = pairs_jsonl(str(self.jsonl), source=self.document_field, target=self.summary_field)
        else:
            raise ValueError(
                f"give --{prefix}documents and --{prefix}summaries, or --{prefix}pairs, or --{prefix}jsonl"
            )
        len(rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file of plain text."""

    text: Annotated[str | None, "File of plain text, read line by line."] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Lines:
        """Return the lines, with their encoding checked."""
        if self.text is None:
            raise ValueError(f"--{prefix}text is missing; give a file of plain text")
        lines = Lines(self.text)
        len(lines)
        return lines


@dataclass(frozen=True, kw_only=True)
class QuestionFile:
    """A file of questions, their documents and their answers."""

    data: Annotated[str | None, "File of questions with documents and answers: JSON in the format of SQuAD."] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> list[Question]:
        """Return the questions, with every answer checked against its document."""
        if self.data is None:
            raise ValueError(f"--{prefix}data is missing; give a JSON file in the format of SQuAD")
        return questions(self.data)


def check_writable(path: Path | None, *read: Path | str | None, flag: str = "", ends: Sequence[str] = ()) -> None:
    """Raise unless the file can be written; commands call this before they compute its content.

    The path must not be an input: a file in `read`, standard input, or anything inside a folder in `read`, except
    pictures, pages and captures, which may be overwritten. If `ends` is given, the path must end in one of them;
    `flag` is the name of its flag.
    """
    if path is None:
        return
    check_parent_folder(path)
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
