"""Collate examples into tensors, with padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Example = Mapping[str, Array]


def pad(rows: Sequence[Array], value: int = 0, *, multiple: int = 1) -> Array:
    """Pad rows on the right into one array (rows, longest rounded up to a `multiple`).

    >>> pad([np.array([5, 6]), np.array([7])]).tolist()
    [[5, 6], [7, 0]]
    """
    longest = round_up(max(map(len, rows), default=0), multiple)
    out = np.full((len(rows), longest), value, dtype=kind(rows))
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def kind(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return the common dtype of arrays: if any is floating point, that of the floating-point arrays, as in PyTorch.

    >>> kind([np.array([5, 6]), np.array([7.5], np.float32)])
    dtype('float32')
    """
    kinds = {array.dtype for array in arrays} or {np.dtype(np.int64)}
    fractions = {one for one in kinds if one.kind == "f"}
    return np.result_type(*(fractions or kinds))


def round_up(length: int, multiple: int) -> int:
    """Round a length up to the next multiple."""
    return -(-length // multiple) * multiple


def collate(examples: Sequence[Example], padding: Mapping[str, int], *, multiple: int = 1) -> dict[str, Tensor]:
    """Collate examples with the same fields into one batch.

    A field of one dim is a sequence: it becomes `name` (b, n), padded, and `name_lengths` (b,). Any other is stacked.
    """
    batch: dict[str, Tensor] = {}
    for name in examples[0]:
        values = [example[name] for example in examples]
        if name in sequences(examples[0]):
            batch[name] = torch.from_numpy(pad(values, padding.get(name, 0), multiple=multiple))
            batch[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
            continue
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            raise ValueError(
                f"the field {name!r} must have one shape in a batch, got {' and '.join(map(str, sorted(shapes)))}; "
                "scale or crop it in encode"
            )
        batch[name] = torch.from_numpy(np.stack(values, dtype=kind(values)))
    return batch


def sequences(example: Example) -> dict[str, Array]:
    """Return the sequence fields: those of one dim."""
    return {name: value for name, value in example.items() if value.ndim == 1}
