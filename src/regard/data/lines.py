"""Lines of a text file by number, for files of any size; the encoding is checked once."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from .compression import BLOCK_BYTES, compression, open_file, read_content
from .errors import DataError

MAX_LINE_BYTES = 2**26
BOM = b"\xef\xbb\xbf"


class Lines:
    """The lines of a UTF-8 file, plain or compressed: `len`, `lines[7]`, and iteration.

    >>> path = getfixture("tmp_path") / "two.txt"
    >>> _ = path.write_text("ein Haus\\nein Hund\\n", encoding="utf8")
    >>> lines = Lines(path)
    >>> len(lines), lines[1], list(lines)
    (2, 'ein Hund', ['ein Haus', 'ein Hund'])

    Lines end at a newline only; a carriage return before it and a byte order mark are removed. The first `len` or index
    reads the file once: it checks the encoding and stores 8 bytes per line, so files may be larger than memory. A gzip,
    xz or bzip2 file is unpacked into memory, up to 4 GiB. Iteration streams the file and stores nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise DataError("is a folder, expected a file", file=path, hint="check the path")
        if not self.path.exists():
            raise DataError("no such file", file=path, hint="check the path")
        if not self.path.is_file():
            raise DataError("is a pipe or a device, expected a file", file=path, hint="write its lines to a file")
        self._starts: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._unpacked: bytes | None = None
        self._handle: IO[bytes] | None = None
        self._owner = 0

    def __len__(self) -> int:
        return len(self._index()) - 1

    def __getitem__(self, number: int) -> str:
        starts = self._index()
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has no line {number}: it has {len(self)}, counted from 0")
        number %= len(self)
        first, last = int(starts[number]), int(starts[number + 1])
        return decode_line(self._read(first, last), self.path, number)

    def __iter__(self) -> Iterator[str]:
        for number, raw in enumerate(raw_lines(self.path)):
            yield decode_line(raw, self.path, number)

    def where(self, number: int) -> str:
        """Return file and line number, counted from 1 as in editors."""
        return f"{self.path} line {number + 1}"

    def error(self, number: int, problem: str, *, hint: str | None = None) -> DataError:
        """Return an error about a line."""
        return DataError(problem, file=self.path, line=number + 1, hint=hint)

    def __repr__(self) -> str:
        return f"Lines({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}

    def _index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._starts is None:
            if compression(self.path) is not None:
                self._unpacked = read_content(self.path)
            self._starts = self._scan()
        return self._starts

    def _scan(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        ends: list[Any] = []
        size, last = 0, b"\n"
        check = codecs.getincrementaldecoder("utf-8")()
        try:
            for block in self._blocks():
                check.decode(block)
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + size + 1)
                size, last = size + len(block), block[-1:]
            check.decode(b"", final=True)
        except UnicodeDecodeError:
            for _ in self:  # reading again line by line raises with the number of the line
                pass
        if size == 0:
            raise DataError("the file is empty", file=self.path, hint="expected at least one line of text")
        starts = np.concatenate([[0], *ends, [] if last == b"\n" else [size]]).astype(np.int64)
        if int(np.diff(starts).max()) > MAX_LINE_BYTES:
            raise too_long(self.path, int(np.diff(starts).argmax()))
        return starts

    def _blocks(self) -> Iterator[bytes]:
        if self._unpacked is not None:
            for start in range(0, len(self._unpacked), BLOCK_BYTES):
                yield self._unpacked[start : start + BLOCK_BYTES]
            return
        with self.path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def _read(self, first: int, last: int) -> bytes:
        if self._unpacked is not None:
            return self._unpacked[first:last]
        # A forked worker shares the position in the file with its parent, so each process opens its own.
        if self._handle is None or self._owner != os.getpid():
            self._handle, self._owner = self.path.open("rb", buffering=0), os.getpid()
        self._handle.seek(first)
        return self._handle.read(last - first)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._handle.close()  # type: ignore[union-attr]


def raw_lines(path: Path) -> Iterator[bytes]:
    """Iterate over the lines of a file as bytes, newline included, in constant memory."""
    with open_file(path) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            if len(raw) > MAX_LINE_BYTES:
                raise too_long(path, number)
            yield raw
            number += 1


def decode_line(raw: bytes, path: Path, number: int) -> str:
    """Decode one line, without its end."""
    if number == 0:
        raw = raw.removeprefix(BOM)
    try:
        return raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} is not valid UTF-8", file=path, line=number + 1, hint="convert it with iconv"
        ) from error


def too_long(path: Path, number: int) -> DataError:
    """Return the error for a line that is too long to be text."""
    problem = f"the line is longer than {MAX_LINE_BYTES:,} bytes"
    return DataError(problem, file=path, line=number + 1, hint="is this a text file?")
