"""Losses as a sum and a count, so that batches of different sizes add up to the mean over all their items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NO_PADDING = -(2**31)  # not a class, and unlike PyTorch's -100 not a number that data holds by accident


@runtime_checkable
class Summed(Protocol):
    """What `model.loss(batch)` may return besides a scalar tensor: the summed loss and the number of its items."""

    @property
    def sum(self) -> Tensor: ...
    @property
    def count(self) -> Tensor | int: ...


@dataclass(frozen=True)
class Loss:
    """The loss summed over `count` items. Accumulation and data parallelism divide once, at the end.

    >>> import torch
    >>> Loss(torch.tensor(6.0), 3).mean
    tensor(2.)
    """

    sum: Tensor
    count: Tensor | int

    @property
    def mean(self) -> Tensor:
        """The loss of one item; 0 where there is none."""
        count = self.count.clamp(min=1) if isinstance(self.count, Tensor) else max(self.count, 1)
        return self.sum / count


def cross_entropy(
    logits: Float[Tensor, "*items classes"],
    targets: Int[Tensor, "*items"],
    *,
    padding: int | None = None,
    smoothing: float = 0.0,
) -> Loss:
    """-sum_c p_c log softmax(logits)_c over the targets that are not `padding`, and how many these are.

    p is 1 - smoothing on the target plus smoothing / classes everywhere (Szegedy et al. 2016, section 7). A padded
    position adds nothing to the sum, to its smoothed part, to the count or to the gradient.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and below 1, got {smoothing}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits must have one more dim than targets, the classes, got {tuple(logits.shape)} and "
            f"{tuple(targets.shape)}"
        )
    ignored = NO_PADDING if padding is None else padding
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.flatten(),
        ignore_index=ignored,
        label_smoothing=smoothing,
        reduction="sum",
    )
    return Loss(total, (targets != ignored).sum())
