"""Files that may be compressed: gzip, xz and bzip2 are read as they are; other formats are refused by name."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from .errors import DataError

BLOCK_BYTES = 2**24
MAX_CONTENT_BYTES = 2**32

File = gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File | BufferedReader

# First bytes of each format: its name, and the function that opens it.
READABLE: dict[bytes, tuple[str, Callable[[Path], Any]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
    b"BZh": ("bzip2", bz2.open),
}
REFUSED = {
    b"\x28\xb5\x2f\xfd": ("Zstandard", "unpack it with zstd -d"),
    b"PK\x03\x04": ("zip", "unpack it with unzip"),
    b"7z\xbc\xaf\x27\x1c": ("7z", "unpack it with 7z x"),
    b"\x04\x22\x4d\x18": ("LZ4", "unpack it with lz4 -d"),
}


def compression(path: Path) -> str | None:
    """Return the format in which a file is compressed, by its first bytes; None for a plain file.

    Raise for a format that is not read.
    """
    with path.open("rb") as file:
        first = file.read(8)
    for magic, (name, hint) in REFUSED.items():
        if first.startswith(magic):
            raise DataError(f"is compressed with {name}, which is not read", file=path, hint=hint)
    return next((name for magic, (name, _) in READABLE.items() if first.startswith(magic)), None)


@contextmanager
def open_file(path: Path) -> Iterator[File]:
    """Open a file for reading, unpacked if it is compressed."""
    name = compression(path)
    openers = dict(READABLE.values())
    try:
        with path.open("rb") if name is None else openers[name](path) as file:
            yield file
    except (gzip.BadGzipFile, zlib.error, EOFError, lzma.LZMAError) as error:
        raise _damage_error(path, name, error) from error
    except OSError as error:
        if name == "bzip2" and error.errno is None:  # bz2 has no error of its own
            raise _damage_error(path, name, error) from error
        raise


def _damage_error(path: Path, name: str | None, error: Exception) -> DataError:
    return DataError(f"the {name} file is damaged ({error})", file=path, hint="download or compress it again")


def read_at_most(file: File, limit: int) -> bytes:
    """Read the rest of a file, or its next `limit` bytes; memory grows with the content, not with the limit."""
    blocks, left = [], limit
    while left and (block := file.read(min(BLOCK_BYTES, left))):
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def read_content(path: Path, limit: int = MAX_CONTENT_BYTES) -> bytes:
    """Return the content of a file, unpacked, of at most `limit` bytes."""
    with open_file(path) as file:
        content = read_at_most(file, limit + 1)
    if len(content) > limit:
        problem = f"holds more than {limit:,} bytes, the limit for reading into memory"
        raise DataError(problem, file=path, hint="split it, or unpack it")
    return content
