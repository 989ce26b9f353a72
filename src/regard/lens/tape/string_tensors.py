"""Lists of strings as tensors of a tape file, whose JSON text has no room for a million tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .term_json import TensorBox, check_fields, tensor_named

DTYPES = {"utf8": torch.uint8, "bytes": torch.int32, "strings": torch.int32}


class StringBox:
    """Rows of strings that go into a `TensorBox`; equal rows are stored once."""

    def __init__(self, box: TensorBox) -> None:
        self._box = box
        self._known: list[tuple[list[list[str]], dict[str, str]]] = []

    def add(self, rows: Sequence[Sequence[str]]) -> dict[str, str]:
        """Add lists of strings and return the names of three tensors.

        They are the text of all strings in UTF-8, the bytes of each string, and the strings of each row. A lone UTF-16
        surrogate is written as UTF-8 would write it if it could.
        """
        wanted = [list(row) for row in rows]
        for known, names in self._known:
            if known == wanted:
                return names
        encoded = [string.encode("utf8", "surrogatepass") for row in rows for string in row]
        text = np.frombuffer(b"".join(encoded), np.uint8).copy()
        tensors = torch.from_numpy(text), _counts(encoded), _counts(rows)
        names = {name: self._box.add(x) for name, x in zip(DTYPES, tensors, strict=True)}
        self._known.append((wanted, names))
        return names


class StringReader:
    """Rows of strings from the tensors of a file; those with the same names are the same lists."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[str, ...], list[list[str]]] = {}

    def read(self, source: Any) -> list[list[str]]:
        """Return the lists of strings that `StringBox.add` named; `ValueError` for anything else."""
        check_fields("strings", source, *DTYPES)
        found = {name: tensor_named(source[name], self._tensors) for name in DTYPES}
        for name, x in found.items():
            if x.dtype != DTYPES[name] or x.ndim != 1:
                raise ValueError(f"{name} of strings must be {DTYPES[name]} with one dim, got {x.dtype} {x.ndim} dims")
        names = tuple(source[name] for name in DTYPES)
        if names not in self._known:
            text, lengths, counts = found.values()
            strings = _split(text.numpy().tobytes(), lengths, "bytes")
            rows = _split([string.decode("utf8", "surrogatepass") for string in strings], counts, "strings")
            self._known[names] = rows
        return self._known[names]


def _counts(parts: Sequence[Sequence[Any]]) -> Tensor:
    return torch.tensor([len(part) for part in parts], dtype=torch.int32)


def _split(whole: Any, counts: Tensor, what: str) -> list[Any]:
    """Cut a sequence into parts of given lengths; raise unless they add up to the whole."""
    if bool((counts < 0).any()) or int(counts.sum()) != len(whole):
        raise ValueError(f"the counts of {what} must be at least 0 and add up to {len(whole)}")
    edges = [0, *counts.cumsum(0).tolist()]
    return [whole[start:stop] for start, stop in pairwise(edges)]
