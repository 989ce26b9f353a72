"""Losses as a sum and a count over real tokens, so that training can average over the items of several batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import check_integer_tensor


@dataclass(frozen=True)
class Loss:
    """A loss summed over `count` items; training adds up sums and counts of batches of any sizes and divides once.

    >>> import torch
    >>> Loss(torch.tensor(6.0), 3).mean
    tensor(2.)
    """

    sum: Tensor
    count: Tensor | int

    @property
    def mean(self) -> Tensor:
        """The mean loss per item; 0 if there is no item."""
        count = self.count.clamp(min=1) if isinstance(self.count, Tensor) else max(self.count, 1)
        return self.sum / count


def cross_entropy(
    logits: Float[Tensor, "*items classes"],
    targets: Int[Tensor, "*items"],
    *,
    counted: Bool[Tensor, "*items"] | None = None,
    smoothing: float = 0.0,
) -> Loss:
    """-sum_c p_c log softmax(logits)_c summed over the `counted` targets (default: all), and their number.

    p is 1 - smoothing on the target plus smoothing / classes everywhere (Szegedy et al. 2016, section 7). A target
    that is not counted adds nothing to the sum, its smoothed part or the gradient, whatever its id and its logits are.
    """
    each = cross_entropy_per_target(logits, targets, counted=counted, smoothing=smoothing)
    return Loss(each.sum(), targets.numel() if counted is None else counted.sum())


def cross_entropy_per_target(
    logits: Float[Tensor, "*items classes"],
    targets: Int[Tensor, "*items"],
    *,
    counted: Bool[Tensor, "*items"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, "*items"]:
    """Return the terms of `cross_entropy`, one per target; 0 for targets that are not counted."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and below 1, got {smoothing}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits must have one more dim than targets, the classes, got {tuple(logits.shape)} and "
            f"{tuple(targets.shape)}"
        )
    check_integer_tensor("targets", targets, targets.ndim)
    labels = targets.long()
    if counted is not None:
        labels = labels.masked_fill(~counted, IGNORED)
        if torch.is_grad_enabled():  # the gradient of a softmax of NaN is NaN, even times 0
            logits = logits.masked_fill(~counted[..., None], 0.0)
    each = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="none",
    )
    return each.view(targets.shape)


def shift_right(target: Int[Tensor, "b n"], *, start: int) -> Int[Tensor, "b n"]:
    """Return the inputs of a decoder with teacher forcing: the start token, then the target without its last token."""
    return F.pad(target, (1, 0), value=start)[:, :-1]


IGNORED = -(2**31)  # no class id; unlike -100, the default of PyTorch, data does not contain it by accident
