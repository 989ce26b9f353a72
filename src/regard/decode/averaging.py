"""Checkpoint averaging: one model from several checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


@torch.no_grad()
def average(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each tensor over several state dicts, in its own dtype.

    >>> import torch
    >>> average([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}])
    {'w': tensor([2., 4.])}

    Checkpoints are read one at a time and summed in float64, so a generator that reads files needs the memory of two.
    Tensors that are not floating point (counters, masks) are taken from the last checkpoint. The average of models
    from separate runs is meaningless; use `Ensemble` for them.
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
        raise ValueError("pass at least one checkpoint, got none")
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
