"""The gradient of an update: the clipped gradient of the mean loss over all items of its batches on all processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batches import move_to_device
from .cuda_graphs import Pass
from .distributed import Group, gradient_sync
from .losses import Summed
from .optimizer import scale, whole


class Objective(nn.Module):
    """`model.loss` as the forward pass of a module, which PyTorch can compile and distribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, batch: Any, handed: dict[str, float]) -> tuple[Tensor, Tensor]:
        """Return the summed loss and its count; a scalar tensor counts as one item."""
        loss = self.model.loss(batch, **handed)
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"loss must be a scalar, got shape {tuple(loss.shape)}; return an object with sum and count"
                )
            return loss.reshape(()), torch.ones((), device=loss.device)
        if not isinstance(loss, Summed):
            raise TypeError(f"loss must be a scalar tensor or have sum and count, got {type(loss).__name__}")
        count = loss.count if isinstance(loss.count, Tensor) else torch.full((), loss.count, device=loss.sum.device)
        return loss.sum, count


@dataclass(frozen=True)
class GradientStep:
    """The loss summed over all items of an update, their number, and the norm of the gradient of its mean."""

    sum: float
    count: float
    norm: float  # before clipping

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.sum / max(self.count, 1.0)

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return math.isfinite(self.sum) and math.isfinite(self.norm)


def mean_gradient(
    trained: nn.Module, weighed: list[tuple[Any, float]], once: Pass, group: Group, *, clip: float | None
) -> GradientStep:
    """Set the parameters' gradients to that of the weighted mean loss of the batches, with a norm of at most `clip`.

    A gradient that is not finite is left unscaled, as that of the sum.
    """
    results = []
    for place, (batch, weight) in enumerate(weighed, start=1):
        with gradient_sync(trained, now=place == len(weighed)):
            loss, count = once(batch, weight)
        wide = torch.promote_types(loss.dtype, torch.float32)
        results.append(torch.stack([loss.to(wide), count.to(wide)]))
    gradients = [p.grad for p in trained.parameters() if p.grad is not None]
    length = whole(nn.utils.get_total_norm(gradients)).to(results[0].device)
    # One transfer for all numbers, so that the GPU is synchronized once a step.
    *numbers, norm = torch.cat([*results, length[None]]).tolist()
    total = sum(weight * loss for (_, weight), loss in zip(weighed, numbers[::2], strict=True))
    items = sum(weight * count for (_, weight), count in zip(weighed, numbers[1::2], strict=True))
    total, items = group.sum([total, items])
    # Gradients are those of sums, averaged over processes; one factor makes them those of the mean, clipped.
    mean = group.size / max(items, 1.0)
    step = GradientStep(total, items, mean * norm)
    if step.finite:
        scale(gradients, mean if clip is None else mean * min(1.0, clip / (step.norm + 1e-6)))
    return step


def forward_and_backward(
    trained: nn.Module,
    autocast: torch.autocast,
    device: torch.device,
    handed: dict[str, float],
    batch: Any,
    weight: float,
) -> tuple[Tensor, Tensor]:
    """Return loss and count of a batch; add the gradient of loss times weight to the parameters' gradients."""
    with autocast:
        loss, count = trained(move_to_device(batch, device), handed)
    (loss * weight).backward()
    return loss.detach(), count
