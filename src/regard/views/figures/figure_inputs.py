"""Inputs of figures: a `Weights`, tensor or array as numbers, pooled if there are too many to draw."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...lens.real_tokens import padding_queries, real_queries, received_from
from ...ops.weights import Weights

Numbers = npt.NDArray[np.float64]
Matrix = Weights | Tensor | npt.NDArray[Any]


def cells(A: Matrix, most: int) -> Numbers:
    """Return the matrix as an array of at most `most` cells a side, each the mean of its entries."""
    i, j = shape(A)
    rows, cols = min(i, most), min(j, most)
    return numbers(A.pool(rows, cols)).reshape(rows, cols) if isinstance(A, Weights) else _pool(numbers(A), most)


def heads(layer: Matrix, most: int) -> tuple[Numbers, tuple[int, int]]:
    """Return the cells of every head of a layer, and its shape (queries, keys).

    A layer is a `Weights` of one batch row, or a tensor or array of dims h i j.
    """
    if isinstance(layer, Weights):
        if layer.shape[:-3].numel() != 1:
            raise ValueError(
                f"a layer must have one batch row, got shape {tuple(layer.shape)}; write A.select(batch=0)"
            )
        h, i, j = _check_heads(layer)
        return numbers(layer.pool(min(i, most), min(j, most))).reshape(h, min(i, most), min(j, most)), (i, j)
    dense = _layer(layer)
    return _pool(dense, most), (dense.shape[1], dense.shape[2])


def entropy_and_distance(layer: Matrix) -> tuple[Numbers, Numbers]:
    """Return entropy and distance for each head of a layer, averaged over batch rows and the queries that are real."""
    if isinstance(layer, Weights):
        n, *_ = _check_heads(layer)
        found, real = layer.summary(), real_queries(layer).unsqueeze(-2)
        count = real.sum(-1).clamp(min=1)
        means = (torch.where(real, x, 0.0).sum(-1) / count for x in (found.entropy, found.distance))
        entropy, distance = (numbers(x).reshape(-1, n).mean(0) for x in means)
        return entropy, distance
    A = _layer(layer)
    i, j = A.shape[1:]
    away = np.abs(np.arange(i)[:, None] + j - i - np.arange(j))
    entropy, distance = -(A * np.log(np.where(A > 0, A, 1.0))).sum(-1), (A * away).sum(-1)
    return entropy.mean(-1), distance.mean(-1)


def row(A: Matrix, query: int) -> Numbers:
    """Return the weights of one query over the keys; a negative query counts from the end."""
    i, _ = shape(A)
    try:
        query = index(query)
    except TypeError:
        raise TypeError(f"query must be a whole number, got {query!r}") from None
    if not -i <= query < i:
        raise ValueError(f"query must be from 0 to {i - 1}, or negative from the end, got {query}")
    return numbers(A[..., query, :]).reshape(-1)


def mean_received(A: Matrix) -> Numbers:
    """Return the weight that each key receives from the mean query; padding queries of a `Weights` do not count."""
    i, j = shape(A)
    if not isinstance(A, Weights):
        return numbers(A).sum(0) / i
    queries = padding_queries(A)
    count = i if queries is None else max(int(queries.sum()), 1)
    return numbers(received_from(A, queries)).reshape(j) / count


def shape(A: Matrix) -> tuple[int, int]:
    """Return the numbers of queries and keys of a single matrix; raises for several."""
    if not isinstance(A, Weights | Tensor | np.ndarray):
        raise TypeError(f"A must be a Weights, or a 2-D tensor or array, got {type(A).__name__}")
    *lead, i, j = (1, 1, *A.shape)[-max(len(A.shape), 2) :]
    if len(A.shape) < 2 or (lead and (not isinstance(A, Weights) or torch.Size(lead).numel() != 1)):
        hint = "A.select(batch=0, heads=0)" if isinstance(A, Weights) else "A[0, 0], or A.mean(...)"
        raise ValueError(f"A must be one matrix of queries by keys, got shape {tuple(A.shape)}; write {hint}")
    if not (i and j):
        raise ValueError(f"A must have queries and keys to show, got shape {tuple(A.shape)}")
    return i, j


def numbers(x: Tensor | npt.NDArray[Any]) -> Numbers:
    """Return a tensor or array as float64 numbers."""
    is_complex = x.is_complex() if isinstance(x, Tensor) else np.iscomplexobj(x)
    if is_complex:
        raise TypeError(f"A must hold real numbers, got {x.dtype}; write A.real or abs(A)")
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64).numpy()
    return np.asarray(x, dtype=np.float64)


def to_pixels(picture: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return pixels y x or y x c, as values from 0 to 1 or bytes."""
    if isinstance(picture, Tensor) and picture.is_floating_point():
        picture = numbers(picture)  # bfloat16 has no NumPy dtype
    pixels = picture.detach().cpu().numpy() if isinstance(picture, Tensor) else np.asarray(picture)
    if np.iscomplexobj(pixels):
        raise TypeError(f"picture must hold real numbers, got {pixels.dtype}")
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if not pixels.size or (pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[-1] not in (3, 4))):
        raise ValueError(f"picture must have dims y x, y x c or c y x, c of 1, 3 or 4, got shape {pixels.shape}")
    if pixels.dtype == np.uint8:
        return pixels
    pixels = pixels.astype(np.float64)
    if pixels.min() < 0 or pixels.max() > 1:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low or 1.0)  # undo a normalization, roughly
    return pixels


def _layer(layer: Tensor | npt.NDArray[Any]) -> Numbers:
    if not isinstance(layer, Tensor | np.ndarray) or len(layer.shape) != 3:
        got = tuple(layer.shape) if hasattr(layer, "shape") else type(layer).__name__
        raise ValueError(f"a layer must be a Weights, or a tensor or array of dims h i j, got {got}")
    _check_heads(layer)
    return numbers(layer)


def _check_heads(layer: Matrix) -> tuple[int, int, int]:
    h, i, j = layer.shape[-3:]
    if 0 in layer.shape:
        raise ValueError(
            f"a layer must have batch rows, heads, queries and keys to show, got shape {tuple(layer.shape)}"
        )
    return h, i, j


def _pool(dense: Numbers, most: int) -> Numbers:
    """Average bins of the last two axes, as `Weights.pool` does: entry r falls in bin r * bins // n."""
    for axis in (-2, -1):
        n, bins = dense.shape[axis], min(dense.shape[axis], most)
        starts = -(-np.arange(bins) * n // bins)
        sizes = np.diff(np.append(starts, n))
        dense = np.add.reduceat(dense, starts, axis) / (sizes[:, None] if axis == -2 else sizes)
    return dense
