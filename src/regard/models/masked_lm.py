"""Masking: words to foretell, for a masked language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def mask_words(
    ids: Int[Tensor, "b n"],
    *,
    mask: int,
    vocabulary: int,
    special: Sequence[int] = (),
    share: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Ids to read and targets to foretell: a `share` of the words, 8 in 10 of them masked, 1 random, 1 as it was.

    Targets are -100 where nothing is asked. `special` ids, padding among them, are never asked for (Devlin et al. 2019,
    sec. 3.1 and app. A.1).
    """
    fate = torch.rand(2, *ids.shape, generator=generator, device=ids.device)
    asked = (fate[0] < share) & ~torch.isin(ids, torch.tensor(tuple(special), device=ids.device, dtype=ids.dtype))
    random = torch.randint(vocabulary, ids.shape, generator=generator, device=ids.device, dtype=ids.dtype)
    read = torch.where(asked & (fate[1] < 0.8), mask, ids)
    read = torch.where(asked & (fate[1] >= 0.9), random, read)
    return read, torch.where(asked, ids, -100)
