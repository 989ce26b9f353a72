"""Evaluate a mask_mod or score_mod of FlexAttention, a function of one pair (b, h, i, j), over whole rows of pairs.

Most of them accept broadcast index tensors, and return dims of size 1 for indices that they do not use. One such as
`table[b][i, j]` would compute something else, so each is compared with torch.vmap on a few pairs first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .infer_mask import Rows

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PROBED = 4  # indices of each dim
ONE_BY_ONE = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


def rows_of(mod: Mod, shape: tuple[int, int, int, int], device: torch.device) -> Rows:
    """Return the values of a mod for all pairs, `b|1 h|1 i j`, as rows."""
    b, h, i, j = (torch.arange(n, device=device) for n in shape)
    at_once = all_at_once(mod, shape, device) is not None

    def block(start: int, stop: int) -> Tensor:
        if not at_once:
            return _one_by_one(mod)(b, h, i[start:stop], j)
        value = mod(*_spread(b, h, i[start:stop], j))
        return value[(None,) * (4 - value.ndim)].expand(-1, -1, stop - start, len(j))

    first = block(0, min(1, len(i)))
    return Rows((first.shape[0], first.shape[1], len(i), len(j)), block, device)


def all_at_once(mod: Mod, shape: tuple[int, int, int, int], device: torch.device) -> torch.Size | None:
    """Return the shape, `b|1 h|1 i|1 j|1`, that a mod returns for broadcast indices; None if it cannot."""
    some = [torch.linspace(0, max(0, n - 1), min(PROBED, n), device=device).round().long() for n in shape]
    if not all(map(len, some)):
        return torch.Size((1, 1, 1, 1))
    truth = _one_by_one(mod)(*some)
    try:
        value = mod(*_spread(*some))
        return value[(None,) * (4 - value.ndim)].shape if torch.equal(value.expand_as(truth), truth) else None
    except (IndexError, RuntimeError):  # shapes that do not broadcast
        return None


def _spread(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def _one_by_one(mod: Mod) -> Mod:
    """Return the mod as a function of four index vectors, `b, h, i, j -> b h i j`, by torch.vmap."""
    for dims in ONE_BY_ONE:
        mod = torch.vmap(mod, in_dims=dims)
    return mod
