"""Padding as an argument of models: lengths, or a keep that is True for real tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from ..checks import check_integer_tensor, check_tensor, check_token_rows
from ..ops.torch_state import can_read_values

Padded = Bool[Tensor, "b n"] | Int[Tensor, " b"]


def keep_of(keep: Padded, ids: Int[Tensor, "b n"], *, name: str = "keep") -> Bool[Tensor, "b n"]:
    """Return a keep `(b, n)`, True for real tokens, from lengths `(b,)` or a keep.

    >>> keep_of(torch.tensor([3, 1]), torch.zeros(2, 3, dtype=torch.long)).tolist()
    [[True, True, True], [True, False, False]]
    """
    check_tensor(name, keep, hint="torch.tensor([3, 5])")
    if keep.dtype == torch.bool and keep.shape == ids.shape:
        return keep
    if keep.dtype == torch.bool or keep.ndim != 1:
        raise ValueError(
            f"{name} must be lengths (b,) or keep (b, n), True = a real token, for ids {tuple(ids.shape)}, "
            f"got {keep.dtype} {tuple(keep.shape)}"
        )
    return counted_of(keep, ids, name=name)


def counted_of(lengths: Int[Tensor, " b"], ids: Int[Tensor, "b n"], *, name: str) -> Bool[Tensor, "b n"]:
    """Return a keep `(b, n)`, True for real tokens, from lengths `(b,)` alone."""
    check_lengths(name, lengths, ids)
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def counted_targets(batch: Mapping[str, Tensor]) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Return the `target` of a batch and a keep of its real tokens, from `target_lengths` if given."""
    target, lengths = batch["target"], batch.get("target_lengths")
    check_token_rows("target", target)
    if lengths is None:
        return target, torch.ones_like(target, dtype=torch.bool)
    return target, counted_of(lengths, target, name="target_lengths")


def check_lengths(name: str, lengths: Int[Tensor, " b"], x: Shaped[Tensor, "b n *dim"]) -> None:
    """Raise unless `lengths` are the numbers of real tokens of the rows of x; values are checked on the CPU only."""
    check_tensor(name, lengths, hint="torch.tensor([3, 5])")
    if lengths.dtype == torch.bool:
        raise TypeError(
            f"{name} must be the number of real tokens per row, with padding on the right, got torch.bool "
            f"{tuple(lengths.shape)}; write keep.sum(1) if the padding is on the right"
        )
    check_integer_tensor(name, lengths, 1)
    b, n = x.shape[:2]
    if len(lengths) != b:
        raise ValueError(f"{name} must be one number per row, from 0 to {n}, for {b} rows, got {len(lengths)} numbers")
    if b and can_read_values(lengths):
        least, most = (int(x) for x in lengths.aminmax())
        if least < 0 or most > n:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} must be one number per row, from 0 to {n}, for {b} rows, got {wrong}")
