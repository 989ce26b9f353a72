"""Losses as a sum and a count: real tokens only, shifted once, averaged over all items of any batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import check_integer_tensor


@dataclass(frozen=True)
class Loss:
    """A loss summed over `count` items: what training adds up over batches of any sizes and divides once.

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
    counted: Bool[Tensor, "*items"] | None = None,
    smoothing: float = 0.0,
) -> Loss:
    """-sum_c p_c log softmax(logits)_c over the targets that count, all unless given, and how many these are.

    p is 1 - smoothing on the target plus smoothing / classes everywhere (Szegedy et al. 2016, section 7). What is
    not counted adds nothing to the sum, to its smoothed part or to the gradient, whatever it holds.
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
    """The terms of `cross_entropy`, one for each target; 0 for those that do not count."""
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
        if torch.is_grad_enabled():  # the slope of a softmax of NaN is NaN, be it times 0
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
    """What a decoder reads to write the target: the start, then all of the target but its last token."""
    return F.pad(target, (1, 0), value=start)[:, :-1]


IGNORED = -(2**31)  # not a class, and unlike PyTorch's -100 not a number that data holds by accident
