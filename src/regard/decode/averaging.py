"""Checkpoint averaging: one model out of the last few of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


@torch.no_grad()
def average(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor over several state dicts, in its own dtype.

    >>> import torch
    >>> average([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}])
    {'w': tensor([2., 4.])}

    Taken one at a time and summed in float64, so that a generator which reads files needs the memory of two. Tensors
    that are not floating (counters, masks) are the last checkpoint's. Averaging models of separate runs makes
    nonsense: for those, `Ensemble`.
    """
    sums: dict[str, Tensor] = {}
    last: Mapping[str, Tensor] = {}
    count = 0
    for count, checkpoint in enumerate(checkpoints, 1):
        if count > 1:
            _check_matches(checkpoint, last, count)
        for name, x in checkpoint.items():
            if x.is_floating_point() or x.is_complex():
                wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
                sums[name] = sums[name] + wide if name in sums else wide
        last = checkpoint
    if not count:
        raise ValueError("checkpoints must hold at least one state dict, got none")
    return {name: (sums[name] / count).to(x.dtype) if name in sums else x.clone() for name, x in last.items()}


def _check_matches(checkpoint: Mapping[str, Tensor], last: Mapping[str, Tensor], number: int) -> None:
    if odd := checkpoint.keys() ^ last.keys():
        raise ValueError(
            f"checkpoints must hold the same tensors, got {sorted(odd)[:3]} in only one of numbers {number - 1} and "
            f"{number}"
        )
    for name, x in checkpoint.items():
        if x.shape != last[name].shape or x.dtype != last[name].dtype:
            raise ValueError(
                f"checkpoints must agree on shapes and dtypes, got {name} {tuple(last[name].shape)} {last[name].dtype} "
                f"in number {number - 1} and {tuple(x.shape)} {x.dtype} in number {number}"
            )
