"""The lines of standard input, in chunks that are decoded together."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import typer

from ..data.lines import decode_line

LINES_PER_CHUNK = 2048
BYTES_PER_READ = 2**16
STDIN = Path("standard input")
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Print each line's output before the next line is read, from files too. From a terminal or a pipe, the "
        "lines that have arrived are decoded together.",
    ),
]


def chunks_of_input(*, stream: bool = False) -> Iterator[list[str]]:
    """Yield the lines of standard input in chunks: of a file many, from a pipe or a terminal those that have arrived.

    So a program that waits for each answer receives it, and a file is decoded in large batches. With `stream` every
    chunk is one line.
    """
    number = count()
    for raw in _raw_chunks(1 if stream else LINES_PER_CHUNK):
        yield [decode_line(line, STDIN, next(number)) for line in raw]


def _raw_chunks(most: int) -> Iterator[list[bytes]]:
    """Yield the lines in chunks of at most `most`."""
    source = sys.stdin.buffer
    if (pipe := _pipe_descriptor()) is None:
        most = 1 if sys.stdin.isatty() else most
        while chunk := list(islice(source, most)):
            yield chunk
        return
    for arrived in _arrived_lines(pipe, most):
        for first in range(0, len(arrived), most):
            yield arrived[first : first + most]


def _pipe_descriptor() -> int | None:
    """Return the descriptor of standard input if it is a pipe, a socket or a terminal that can be waited for."""
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):  # replaced by a stream of Python
        return None
    return None if os.name != "posix" or stat.S_ISREG(os.fstat(descriptor).st_mode) else descriptor


def _arrived_lines(descriptor: int, enough: int) -> Iterator[list[bytes]]:
    """Yield the lines that have arrived, at least one; stop to read once there are enough."""
    lines: list[bytes] = []
    unfinished: list[bytes] = []
    while read := os.read(descriptor, BYTES_PER_READ):
        first, *others = read.split(b"\n")
        unfinished.append(first)
        if others:
            lines += [b"".join(unfinished), *others[:-1]]
            unfinished = [others[-1]]
        if lines and (len(lines) >= enough or not select.select([descriptor], [], [], 0)[0]):
            yield lines
            lines = []
    if last := b"".join(unfinished):
        lines.append(last)
    if lines:
        yield lines
