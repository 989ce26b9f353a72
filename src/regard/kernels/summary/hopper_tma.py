"""Keys of many heads as one matrix, which is how a GPU copies tiles of them by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(x: Tensor) -> Tensor:
    """The same numbers, where copies of 16 bytes may begin at every row."""
    if x.stride(-1) == 1 and not any(n % 16 for n in (*x.stride()[:-1], x.data_ptr())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def flat(k: Tensor) -> tuple[Tensor, tuple[int, int], int]:
    """Keys `b g j d` as a matrix; how many rows of it lie from a batch row and from a head to the next, and columns.

    Heads may lie side by side or one after the other, with anything between them; otherwise keys are copied.
    """
    k = aligned(k)
    found = _steps(k)
    if found is None:
        k = k.contiguous()
        found = _steps(k)
        assert found is not None
    (batch, head), side = found
    b, g, n, d = k.shape
    matrix = k.as_strided(((b - 1) * batch + (g - 1) * head + n, (g - 1) * side + d), (k.stride(2), 1))
    return matrix, (batch, head), side


def _steps(k: Tensor) -> tuple[tuple[int, int], int] | None:
    b, g, _, d = k.shape
    k_b, k_g, k_j, _ = k.stride()
    k_b, k_g = k_b if b > 1 else 0, k_g if g > 1 else 0
    if k_j < d or k_b % k_j:
        return None
    if k_g % k_j == 0:
        return (k_b // k_j, k_g // k_j), 0
    return ((k_b // k_j, 0), k_g) if (g - 1) * k_g + d <= k_j else None
