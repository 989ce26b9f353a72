"""Bins and groups: which cell of a map a query or a key falls into."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def even_bins(n: int, count: int, device: torch.device) -> Tensor:
    """The bin of each of n neighbours in `count` bins as even as can be: `1 n`. Not to be written to."""
    with torch.inference_mode(False):
        return (torch.arange(n, device=device) * count // max(n, 1))[None]


@lru_cache(maxsize=16)
def even_area(n_i: int, n_j: int, rows: int, cols: int, device: torch.device) -> Tensor | int:
    """How many entries each pair of even bins holds, 1 at least: a number, or `rows cols`, not to be written to."""
    if n_i % rows == n_j % cols == 0:
        return max(1, (n_i // rows) * (n_j // cols))
    with torch.inference_mode(False):
        counts = []
        for n, count in ((n_i, rows), (n_j, cols)):
            starts = (torch.arange(count + 1, device=device) * n + count - 1) // count
            counts.append(starts.diff())
        return (counts[0][:, None] * counts[1]).clamp(min=1)


def groups(name: str, ids: Tensor, b: int, n: int, device: torch.device) -> Tensor:
    """Ids that a caller gave, as `1 n` or `b n`."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be a tensor of whole numbers, got {kind}")
    if tuple(ids.shape) not in ((n,), (b, n), (1, n)):
        raise ValueError(f"{name} must have dims ({n},) or ({b}, {n}), got shape {tuple(ids.shape)}")
    if ids.numel() and int(ids.min()) < 0:
        raise ValueError(f"{name} must be 0 or more, got {int(ids.min())}")
    return (ids if ids.ndim == 2 else ids[None]).to(device).long()
