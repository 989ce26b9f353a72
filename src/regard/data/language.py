"""Plain text for language models: one long sequence of ids, in memory or on disk, and windows over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ..atomic_files import atomic_path, check_parent_folder
from .errors import DataError
from .text import check_not_a_string
from .tokenizers import Tokenizer

Ids = np.ndarray[Any, np.dtype[Any]]
TEXTS_PER_CHUNK = 1024


class Windows:
    """Windows of `size + 1` ids over a long sequence: the first `size` are the input, the last `size` the targets.

    >>> [window.tolist() for window in Windows(np.arange(8), size=3)]
    [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]

    Each id except the first is a target once; the last window may be shorter.
    """

    def __init__(self, ids: Ids, *, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if ids.ndim != 1 or ids.dtype.kind not in "ui" or len(ids) < 2:
            raise ValueError(f"ids must be a 1-D array of at least 2 whole numbers, got {ids.dtype} {ids.shape}")
        self.ids, self.size = ids, size

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.size)

    def __getitem__(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no window {number}: there are {len(self)}, counted from 0")
        start = number % len(self) * self.size
        return np.array(self.ids[start : start + self.size + 1], dtype=np.int64)

    def __iter__(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        return (self[number] for number in range(len(self)))


def ids_of(texts: Iterable[str], tokenizer: Tokenizer, *, eos: bool = True) -> Ids:
    """Encode all texts into one array in memory, with `eos` after each text by default."""
    found = np.concatenate([np.empty(0, _width(tokenizer)), *_encode_chunks(texts, tokenizer, eos)])
    if len(found) == 0:
        raise DataError("there is no text", hint="expected at least one line")
    return found


def write_ids(texts: Iterable[str], tokenizer: Tokenizer, path: str | Path, *, eos: bool = True) -> Ids:
    """Encode all texts into a `.npy` file, atomically, and open it: for text larger than memory."""
    path, width = Path(path), _width(tokenizer)
    check_parent_folder(path)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        count = 0
        _header(file, width, count)
        for ids in _encode_chunks(texts, tokenizer, eos):
            count += len(ids)
            file.write(ids.tobytes())
        if count == 0:
            raise DataError("there is no text", file=path, hint="expected at least one line")
        # NumPy pads the header for a longer count, so the count can be written last.
        file.seek(0)
        _header(file, width, count)
    return read_ids(path)


def read_ids(path: str | Path) -> Ids:
    """Open a file of `write_ids` as a memory-mapped array."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"not a file of ids ({error})", file=path, hint="write it with write_ids") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise DataError("not a file of ids", file=path, hint="write it with write_ids")
    return ids


def _width(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


def _encode_chunks(texts: Iterable[str], tokenizer: Tokenizer, eos: bool) -> Iterator[Ids]:
    check_not_a_string(texts)
    rest = iter(texts)
    while some := list(islice(rest, TEXTS_PER_CHUNK)):
        for ids in tokenizer.encode_all(some, eos=eos):
            yield np.array(ids, _width(tokenizer))


def _header(file: Any, width: np.dtype[Any], count: int) -> None:
    npy.write_array_header_1_0(file, {"descr": width.str, "fortran_order": False, "shape": (count,)})
