"""Padding as models take it: lengths, or which tokens are real."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from ..checks import check_integer_tensor, check_tensor, check_token_rows
from ..ops.torch_state import can_read_values

Padded = Bool[Tensor, "b n"] | Int[Tensor, " b"]


def keep_of(padding: Padded, ids: Int[Tensor, "b n"], *, name: str = "padding") -> Bool[Tensor, "b n"]:
    """Which of the tokens are real, from lengths `(b,)` or keep `(b, n)`.

    >>> keep_of(torch.tensor([3, 1]), torch.zeros(2, 3, dtype=torch.long)).tolist()
    [[True, True, True], [True, False, False]]
    """
    check_tensor(name, padding, hint="torch.tensor([3, 5])")
    if padding.dtype == torch.bool and padding.shape == ids.shape:
        return padding
    if padding.dtype == torch.bool or padding.ndim != 1:
        raise ValueError(
            f"{name} must be lengths (b,) or keep (b, n), True = a real token, for ids {tuple(ids.shape)}, "
            f"got {padding.dtype} {tuple(padding.shape)}"
        )
    return counted_of(padding, ids, name=name)


def counted_of(lengths: Int[Tensor, " b"], ids: Int[Tensor, "b n"], *, name: str) -> Bool[Tensor, "b n"]:
    """The same where it is lengths alone that are meant."""
    check_lengths(name, lengths, ids)
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def counted_targets(batch: Mapping[str, Tensor]) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """The `target` of a batch, and which of its tokens `target_lengths`, if there, say are real."""
    target, lengths = batch["target"], batch.get("target_lengths")
    check_token_rows("target", target)
    if lengths is None:
        return target, torch.ones_like(target, dtype=torch.bool)
    return target, counted_of(lengths, target, name="target_lengths")


def check_lengths(name: str, lengths: Int[Tensor, " b"], x: Shaped[Tensor, "b n *dim"]) -> None:
    """Raise unless `lengths` say of each row of x how many of its tokens are real; numbers are looked at on the CPU."""
    check_tensor(name, lengths, hint="torch.tensor([3, 5])")
    if lengths.dtype == torch.bool:
        raise TypeError(
            f"{name} must say how many tokens of each row are real, the padding behind them, got torch.bool "
            f"{tuple(lengths.shape)}; write keep.sum(1) of a keep that is padded so"
        )
    check_integer_tensor(name, lengths, 1)
    b, n = x.shape[:2]
    if len(lengths) != b:
        raise ValueError(f"{name} must be one a row, from 0 to {n}, for {b} rows, got {len(lengths)} of them")
    if b and can_read_values(lengths):
        least, most = (int(x) for x in lengths.aminmax())
        if least < 0 or most > n:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} must be one a row, from 0 to {n}, for {b} rows, got {wrong}")
