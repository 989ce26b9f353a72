"""Find the output projection of an attention: the linear map whose input is its heads, joined, and nothing else.

It may be missing, belong to another module, as in BERT, or come after other linear maps, so it is recognized by the
numbers of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.checksums import as_integers

# Each linear function -> its input, and its weight in the layout of `nn.Linear`.
MAPS: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    F.linear: lambda input, weight, bias=None: (input, weight),
    torch.addmm: lambda input, mat1, mat2, **_: (mat1, mat2.mT),
}


def projection_weight(heads: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the weight, `dim (h e)`, by which a call multiplies these heads, `b h i e`; None if it does not."""
    if func not in MAPS:
        return None
    x, weight = MAPS[func](*args, **kwargs)
    if x.numel() != heads.numel() or weight.shape[1] != heads.shape[1] * heads.shape[3]:
        return None
    # Compare sums of the bits of each column: tokens may be in any order, with the batch before or after them.
    input_sums = as_integers(x).flatten(0, -2).sum(0, dtype=torch.int64)
    head_sums = as_integers(heads.to(x.dtype)).sum((0, 2), dtype=torch.int64).flatten()
    return weight.detach() if torch.equal(input_sums, head_sums) else None
