"""Files: the data that commands name, checked when they are read, and those they write, checked before the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..data import Lines, Pair, Question, Rows, pairs_jsonl, pairs_tsv, parallel, questions
from ..lens.tape.archive import is_tape
from ..train.dataclass_json import check_types

OVERWRITABLE = (".png", ".html", ".htm")  # what is looked at, and by no model read


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """Parallel text: two files that match line by line, or one of two columns."""

    source: Annotated[str | None, "sentences to read, one a line"] = None
    target: Annotated[str | None, "what they become, line by line"] = None
    pairs: Annotated[str | None, "both at once: a tab-separated file of two columns"] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Rows[Pair]:
        """The pairs, every line checked; `prefix` is what the flags that name the files begin with."""
        both = self.source is not None and self.target is not None
        if both == (self.pairs is not None) or (self.source is None) != (self.target is None):
            raise ValueError(f"give --{prefix}source and --{prefix}target, or --{prefix}pairs")
        rows = pairs_tsv(self.pairs) if self.pairs is not None else parallel(str(self.source), str(self.target))
        len(rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class SummaryFiles:
    """Documents and their summaries: two files that match line by line, or one of both."""

    documents: Annotated[str | None, "documents, one a line"] = None
    summaries: Annotated[str | None, "their summaries, line by line"] = None
    pairs: Annotated[str | None, "both at once: a tab-separated file of two columns"] = None
    jsonl: Annotated[str | None, "both at once: a file with one JSON object a line"] = None
    document_field: Annotated[str, "where a line of JSON has the document"] = "document"
    summary_field: Annotated[str, "where a line of JSON has the summary"] = "summary"

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Rows[Pair]:
        """The pairs, every line checked; `prefix` is what the flags that name the files begin with."""
        given = (self.documents is not None, self.summaries is not None, self.pairs is not None, self.jsonl is not None)
        if given == (True, True, False, False):
            rows = parallel(str(self.documents), str(self.summaries))
        elif given == (False, False, True, False):
            rows = pairs_tsv(str(self.pairs))
        elif given == (False, False, False, True):
            rows = pairs_jsonl(str(self.jsonl), source=self.document_field, target=self.summary_field)
        else:
            raise ValueError(
                f"give --{prefix}documents and --{prefix}summaries, or --{prefix}pairs, or --{prefix}jsonl, and no more"
            )
        len(rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """Plain text."""

    text: Annotated[str | None, "a text, read line by line"] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Lines:
        """The lines, their encoding checked."""
        if self.text is None:
            raise ValueError(f"give --{prefix}text, a file of plain text")
        lines = Lines(self.text)
        len(lines)
        return lines


@dataclass(frozen=True, kw_only=True)
class QuestionFile:
    """Questions, the texts they are about, and their answers."""

    data: Annotated[str | None, "questions with their documents and answers: JSON in the format of SQuAD"] = None

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> list[Question]:
        """The questions, every answer checked against its document."""
        if self.data is None:
            raise ValueError(f"give --{prefix}data, a file in the format of SQuAD")
        return questions(self.data)


def check_writable(path: Path | None, *read: Path | str | None, flag: str = "", ends: Sequence[str] = ()) -> None:
    """Raise unless a file could be written there, before the work that it is to hold.

    It must be none of what is `read`: files, standard input, and folders with all they hold, but for pictures, pages
    and captures of an earlier time. `flag` names it, and it has one of the `ends`, where there are some.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: expected the name of a file in a folder that exists")
    if ends and path.suffix not in ends:
        raise ValueError(f"{flag} must end in {' or '.join(ends)}, got {path}")
    if not path.exists():
        return
    for one in (Path(one) for one in read if one is not None):
        if one.exists() and path.samefile(one):
            raise ValueError(f"{path} is read, and writing would replace it; name another file")
        # A link in the folder is of the folder, wherever it leads, and so is what a link from elsewhere leads to.
        places = path.resolve(), path.parent.resolve() / path.name
        within = one.is_dir() and any(place.is_relative_to(one.resolve()) for place in places)
        if within and path.suffix not in OVERWRITABLE and not is_tape(path):
            raise ValueError(f"{path} is there already, in the folder that is read; name another file")
    if _is_standard_input(path):
        raise ValueError(f"{path} is read as standard input, and writing would replace it; name another file")


def _is_standard_input(path: Path) -> bool:
    """Is the file what the shell gave as standard input?"""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdin.fileno()))
    except (OSError, ValueError, AttributeError):  # standard input that is no file, or is closed
        return False
