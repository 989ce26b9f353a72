"""What terms demand of the numbers and tensors they are made of: checks that raise with the next step."""

from __future__ import annotations

import torch
from torch import Tensor


def must_count(name: str, value: object, least: int = 0) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")


def must_be_tensor(name: str, value: object, hint: str = "wrap it in torch.as_tensor(...)") -> None:
    """Raise unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; write {hint}")


def must_be_bool(name: str, value: object) -> None:
    """Raise unless `value` is a bool tensor of 2 to 4 dims."""
    must_be_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.dtype != torch.bool:
        raise TypeError(
            f"{name} must be bool, True = may attend, got {value.dtype}; write x.bool() for a 0/1 mask, "
            "x == 0 for one made of 0 and -inf, or pass numbers to be added as bias=Added(x)"
        )
    if not 2 <= value.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 dims (b h i j, aligned right), got shape {tuple(value.shape)}")


def must_be_integers(name: str, value: Tensor, dims: int) -> None:
    """Raise unless `value` is a tensor of whole numbers with 1 to `dims` dims."""
    if not _is_integer(value):
        raise TypeError(f"{name} must hold whole numbers, got {value.dtype}; write x.long()")
    if value.ndim > dims:
        raise ValueError(f"{name} must have at most {dims} dims, got shape {tuple(value.shape)}")


def must_broadcast(name: str, x: Tensor, sizes: dict[str, int]) -> None:
    """Raise unless the dims of `x`, aligned right to the letters of `sizes`, are 1 or the size named."""
    letters = list(sizes)
    want = " ".join(f"{letter}={size}" for letter, size in sizes.items())
    if x.ndim > len(letters):
        raise ValueError(f"{name} must have at most {len(letters)} dims ({want}), got shape {tuple(x.shape)}")
    for letter, size in zip(letters[len(letters) - x.ndim :], x.shape, strict=True):
        if size not in (1, sizes[letter]):
            raise ValueError(
                f"{name} must broadcast to ({want}), got shape {tuple(x.shape)}: "
                f"its dim '{letter}' is {size}; pass 1 or {sizes[letter]} there"
            )


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
