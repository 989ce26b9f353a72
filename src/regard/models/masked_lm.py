"""Random masks over tokens, for training a masked language model."""

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
    """Return ids with masks and the targets: a `share` of the tokens is predicted, 8 in 10 masked and 1 in 10 random.

    The other predicted tokens are unchanged. Targets are -100 for tokens that are not predicted. `special` ids, which
    should include padding, are never predicted (Devlin et al. 2019, sec. 3.1 and app. A.1).
    """
    draws = torch.rand(2, *ids.shape, generator=generator, device=ids.device)
    is_target = (draws[0] < share) & ~torch.isin(ids, torch.tensor(tuple(special), device=ids.device, dtype=ids.dtype))
    random = torch.randint(vocabulary, ids.shape, generator=generator, device=ids.device, dtype=ids.dtype)
    masked = torch.where(is_target & (draws[1] < 0.8), mask, ids)
    masked = torch.where(is_target & (draws[1] >= 0.9), random, masked)
    return masked, torch.where(is_target, ids, -100)
