"""Padding as models take it: lengths, or which tokens are real."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..ops.demands import must_be_tensor

Padded = Bool[Tensor, "b n"] | Int[Tensor, " b"]


def keep_of(padding: Padded, ids: Int[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Which of the tokens are real, from lengths `(b,)` or keep `(b, n)`.

    >>> keep_of(torch.tensor([3, 1]), torch.zeros(2, 3, dtype=torch.long)).tolist()
    [[True, True, True], [True, False, False]]
    """
    must_be_tensor("padding", padding, hint="torch.tensor([3, 5])")
    keep = (
        padding if padding.dtype == torch.bool else torch.arange(ids.shape[1], device=ids.device) < padding[..., None]
    )
    if keep.shape != ids.shape:
        raise ValueError(
            f"padding must be lengths (b,) or keep (b, n), True = a real token, for ids {tuple(ids.shape)}, "
            f"got {padding.dtype} {tuple(padding.shape)}"
        )
    return keep
