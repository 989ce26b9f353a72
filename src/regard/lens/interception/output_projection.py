"""The output projection of an attention: the linear map that takes its heads, side by side, and nothing else.

It may be missing, belong to another module, as BERT's does, or come after other linear maps: so it is known by the
numbers that go into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recording.record import as_integers

# What a linear map multiplies, and its weight as `nn.Linear` holds it.
MAPS: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    F.linear: lambda input, weight, bias=None: (input, weight),
    torch.addmm: lambda input, mat1, mat2, **_: (mat1, mat2.mT),
}


def projection(heads: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The weight, `dim (h e)`, by which a call multiplies these heads, `b h i e`; None if it does something else."""
    if func not in MAPS:
        return None
    x, weight = MAPS[func](*args, **kwargs)
    if x.numel() != heads.numel() or weight.shape[1] != heads.shape[1] * heads.shape[3]:
        return None
    # The sums of columns, bit by bit: tokens may stand in any order, with the batch before or after them.
    taken = as_integers(x).flatten(0, -2).sum(0, dtype=torch.int64)
    given = as_integers(heads.to(x.dtype)).sum((0, 2), dtype=torch.int64).flatten()
    return weight.detach() if torch.equal(taken, given) else None
