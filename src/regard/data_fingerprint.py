"""Fingerprints of data in memory, by which a resumed run recognizes the data it began with."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

MAX_ITEMS = 4096  # evenly spaced items of a list that are read
MAX_BYTES = 2**16  # bytes of each array that are read, half of them at each end


def data_fingerprint(items: Sequence[Any]) -> str | None:
    """Return a fingerprint of a list of examples or batches, None for another sequence, which may change at each look.

    >>> data_fingerprint([1, 2]) == data_fingerprint([1, 2]), data_fingerprint([1, 2]) == data_fingerprint([2, 1])
    (True, False)

    Arrays, tensors, numbers, texts, and lists, dicts and dataclasses of them count; of other objects only the type.
    At most 4,096 items are read, and 64 KiB of each array.
    """
    if not isinstance(items, (list, tuple)):
        return None
    step = max(1, -(-len(items) // MAX_ITEMS))
    hashed = hashlib.sha256(b"%d" % len(items))
    for item in (*items[::step], *items[-1:]):
        _add(hashed, item)
    return hashed.hexdigest()[:32]


def _add(hashed: Any, item: Any) -> None:
    if isinstance(item, Tensor):
        _add_array(hashed, str(item.dtype), tuple(item.shape), _ends(item.detach().reshape(-1)))
    elif isinstance(item, np.ndarray) and item.dtype.kind in "buifc":
        _add_array(hashed, str(item.dtype), item.shape, [np.ascontiguousarray(x) for x in _halves(item.reshape(-1))])
    elif isinstance(item, Mapping):
        for key, value in item.items():
            hashed.update(repr(key).encode())
            _add(hashed, value)
    elif isinstance(item, (list, tuple)):
        hashed.update(b"[%d" % len(item))
        for value in item:
            _add(hashed, value)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            _add(hashed, getattr(item, field.name))
    elif isinstance(item, (bool, int, float, complex, str, bytes, type(None))):
        hashed.update(repr(item).encode("utf8", "surrogatepass"))
    else:
        hashed.update(type(item).__name__.encode())


def _add_array(hashed: Any, dtype: str, shape: Sequence[int], parts: list[Any]) -> None:
    hashed.update(f"{dtype} {tuple(shape)}".encode())
    for part in parts:
        hashed.update(part.tobytes())


def _ends(flat: Tensor) -> list[Any]:
    import torch

    return [part.contiguous().view(torch.uint8).cpu().numpy() for part in _halves(flat)]


def _halves(flat: Any) -> list[Any]:
    """Return both ends of a flat array, or all of it if it is small."""
    size = flat.element_size() if isinstance(flat, Tensor) else flat.itemsize
    most = MAX_BYTES // size
    return [flat] if len(flat) <= most else [flat[: most // 2], flat[len(flat) - most // 2 :]]
