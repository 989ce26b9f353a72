"""Is what a kernel returned explained by the weights that were read from its arguments?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...ops.weights import Weights
from ..recording.observed import ObservedAttention

LEAST = 2**-9  # of the length of a row: kernels may multiply float32 in TF32
ROUNDED = 4  # units of the last place of the output


def explains(seen: ObservedAttention, out: Tensor, *, rows: int | None = None) -> bool:
    """Is the output, b h i e, what these weights make of the values, as far as its precision tells?

    Where `rows` are given, that many are looked at, the first and the last among them.
    """
    dtype = torch.promote_types(seen.v.dtype, torch.float32)
    weights = seen._replace(q=seen.q.detach().to(dtype), k=seen.k.detach().to(dtype)).weights
    if rows is not None:
        some = torch.linspace(0, (n := out.shape[2]) - 1, min(rows, n), dtype=torch.float64).round().long()
        some = some.to(out.device)
        # In plain PyTorch: nothing is compiled for a few rows.
        weights, out = Weights(replace(weights.call.select(rows=some), backend="tiled")), out[:, :, some]
    made = weights @ seen.v.detach().to(dtype)
    if made.shape != out.shape:
        return False
    close = max(ROUNDED * torch.finfo(out.dtype).eps, LEAST)
    off, length = (x.transpose(1, 2).flatten(2).norm(dim=-1) for x in (made - out, out.to(dtype)))
    return bool((off <= close * length).all())
