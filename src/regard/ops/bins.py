"""Bins and groups: which cell of a map a query or a key falls into."""

from __future__ import annotations

import torch
from torch import Tensor


def even_bins(n: int, count: int, device: torch.device) -> Tensor:
    """The bin of each of n neighbours in `count` bins as even as can be: `1 n`."""
    return (torch.arange(n, device=device) * count // max(n, 1))[None]


def area(row_bins: Tensor, col_bins: Tensor, rows: int, cols: int) -> Tensor:
    """How many entries each pair of bins holds: `rows cols`."""
    return row_bins[0].bincount(minlength=rows)[:, None] * col_bins[0].bincount(minlength=cols)


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
