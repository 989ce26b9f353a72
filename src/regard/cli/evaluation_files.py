"""Files of `regard evaluate` besides the data: more references, and the outputs that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data import DataError, Lines
from ..data.joined_rows import as_paths
from ..tasks.pairs import TextPair
from ..train import checkpoint as checkpoints
from .files import Files, check_writable
from .terminal import one_line

REFERENCE = "File of more references, one per line, line by line as the targets; may be repeated."
OUT = "Write the outputs to this file, one per line."


def read_references(pairs: Sequence[TextPair], files: Files | None) -> list[list[str]]:
    """Return all references of each pair: its target, and its line of each file."""
    found = [[pair.target] for pair in pairs]
    for path in [] if files is None else as_paths(files):
        lines = Lines(path)
        if len(lines) != len(pairs):
            raise DataError(f"has {len(lines):,} lines, expected one for each of the {len(pairs):,} pairs", file=path)
        for some, line in zip(found, lines, strict=True):
            some.append(line)
    return found


def check_out(out: str | None, *read: Path | str | None, references: Files | None = None) -> None:
    """Raise unless the outputs can be written to the file; it must not be one that the command reads."""
    if out is not None:
        check_writable(Path(out), *read, *([] if references is None else as_paths(references)), flag="--out")


def write_outputs(out: str | None, outputs: Sequence[str]) -> None:
    """Write one output per line, if there is a file to write to."""
    if out is not None:
        checkpoints.write_text(Path(out), "".join(f"{one_line(text)}\n" for text in outputs), then="try again")
