"""Two captures beside each other: their heads ranked by how much they differ, and which tokens of both are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from ...lens.tape.comparison import By, by_difference
from ...ops.weights import Weights
from .captures import MAX_BACKGROUND_WEIGHTS, ApiError, Library, no_summary_error

MEASURES: tuple[By, ...] = ("difference", "js", "kl", "mse")  # the reader ranks by one of them
NUMBERS = (*MEASURES, "largest", "unaligned", "other_unaligned")
PLACES = ("query", "key", "other_query", "other_key")
Run = tuple[int, int, int]  # the first position in the one text, the first in the other, and how many follow


def check_two(library: Library) -> None:
    """Raise `ApiError` unless there are two captures."""
    if len(library.captures) != 2:
        raise ApiError(400, "a comparison needs two captures, and one is open", "open both: regard view a b")


def compared_weights(library: Library) -> int:
    """Return how many weights a comparison of the two captures computes."""
    layers = [layer for capture in library.captures for layer in capture.layers]
    return sum(layer["batch"] * len(layer["heads"]) * layer["n_i"] * layer["n_j"] for layer in layers)


def ranked_heads(library: Library) -> Iterator[float | list[dict[str, Any]]]:
    """Compare the captures a layer at a time: yield the share that is done, and at last the rows, ranked.

    Each row is of a layer, by its number in both captures, a batch row and a head, with every difference of
    `MEASURES`; see `Tape.compare`. They are in the order of the first.
    """
    ours, theirs = library.captures
    largest = max((A.shape.numel() for of in (ours, theirs) for A in map(of.entry, range(len(of.keys)))), default=0)
    if largest > MAX_BACKGROUND_WEIGHTS:
        raise no_summary_error()
    found: list[list[dict[str, Any]]] = []
    try:
        for rows in ours.tape.comparing(theirs.tape, by=MEASURES):
            layer, other = len(found), theirs.keys.index(ours.keys[len(found)])
            found.append([_row(row, layer, other) for row in rows])
            yield len(found) / len(ours.keys)
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"the captures cannot be compared: {error}", "capture the same model twice") from None
    yield [_as_json(row) for row in by_difference(chain.from_iterable(found))]


def aligned_runs(library: Library, capture: int, layer: int, batch: int) -> dict[str, list[Run]]:
    """Return the aligned queries and keys of a layer and its counterpart, as runs of positions."""
    of, other = library.captures[capture], library.captures[1 - capture]
    found = library.counterpart(capture, layer)
    key = of.keys[layer]
    if found is None:
        raise ApiError(400, f"layer {layer} has no counterpart in the other capture", "choose another layer")
    if other.keys[found] != key or not all(isinstance(A, Weights) for A in (of.entry(layer), other.entry(found))):
        described = of.layers[layer]
        return {"queries": [(0, 0, described["n_i"])], "keys": [(0, 0, described["n_j"])]}
    axes = of.tape.align_with(other.tape, key, batch=batch)
    return {name: runs(axis.ours, axis.theirs) for name, axis in zip(("queries", "keys"), axes, strict=True)}


def runs(ours: Tensor, theirs: Tensor) -> list[Run]:
    """Join neighbouring pairs of positions.

    >>> import torch
    >>> runs(torch.tensor([0, 1, 3, 4]), torch.tensor([0, 1, 2, 3]))
    [(0, 0, 2), (3, 2, 2)]
    """
    if not len(ours):
        return []
    breaks = ((ours.diff() != 1) | (theirs.diff() != 1)).nonzero().flatten().add(1).tolist()
    starts, stops = [0, *breaks], [*breaks, len(ours)]
    return [(int(ours[start]), int(theirs[start]), stop - start) for start, stop in zip(starts, stops, strict=True)]


def _row(row: dict[str, Any], layer: int, other: int) -> dict[str, Any]:
    kept = {name: row[name] for name in (*NUMBERS, *PLACES) if name in row}
    return {"layer": layer, "other": other, "batch": row["batch"], "head": row["head"], **kept}


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose numbers are JSON: without those that are NaN, and None for an infinite divergence."""
    return {
        name: None if x == math.inf else x for name, x in row.items() if not (isinstance(x, float) and math.isnan(x))
    }
