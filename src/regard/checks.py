"""What terms demand of the numbers and tensors they are made of: checks that raise with the next step."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

import torch
from torch import Tensor


def must_count(name: str, value: object, least: int = 0) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    if int(value) >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got a larger number")


def must_be_within(name: str, value: object, most: int, what: str) -> None:
    """Raise unless `value` is a whole number from 1 to `most`, the number of `what`."""
    must_count(name, value, least=-(2**63))
    if not 1 <= int(value) <= most:  # type: ignore[call-overload]
        raise ValueError(f"{name} must be from 1 to the number of {what} {most}, got {value}")


def must_be_number(name: str, value: object, above: float = -math.inf) -> None:
    """Raise unless `value` is a finite number above `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite, got {number}")
    if not number > above:
        raise ValueError(f"{name} must be above {above:g}, got {value}")


def must_be_share(name: str, value: float) -> None:
    """Raise unless `value` is at least 0 and below 1."""
    must_be_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def must_be_letters(name: str, value: object, known: str) -> None:
    """Raise unless `value` is some of the letters of `known`, in their order."""
    if not isinstance(value, str) or not set(value) <= set(known):
        raise ValueError(f"{name} must be some of the letters {known!r}, got {value!r}")
    if value != (ordered := "".join(letter for letter in known if letter in value)):
        raise ValueError(f"{name} must have letters in the order of {known!r}, got {value!r}; write {ordered!r}")


def must_be_tensor(name: str, value: object, hint: str = "torch.as_tensor(...)") -> None:
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


def must_be_integers(name: str, value: Tensor, *dims: int) -> None:
    """Raise unless `value` is a tensor of whole numbers with one of these numbers of dims."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must hold whole numbers, got {value.dtype}; write x.long()")
    if value.ndim not in dims:
        allowed = " or ".join(map(str, dims))
        raise ValueError(f"{name} must have {allowed} dims, got shape {tuple(value.shape)}")


def must_broadcast(name: str, x: Tensor, sizes: Mapping[str, int | None]) -> None:
    """Raise unless the dims of `x`, aligned right to the letters, are 1 or the size named; None takes any size."""
    letters = list(sizes)
    if x.ndim > len(letters):
        raise ValueError(f"{name} must have at most {len(letters)} dims ({_named(sizes)}), got shape {tuple(x.shape)}")
    for letter, size in zip(letters[len(letters) - x.ndim :], x.shape, strict=True):
        if sizes[letter] is not None and size != 1 and size != sizes[letter]:
            raise ValueError(
                f"{name} must broadcast to ({_named(sizes)}), got shape {tuple(x.shape)}: "
                f"its dim '{letter}' is {size}; pass 1 or {sizes[letter]} there"
            )


def _named(sizes: Mapping[str, int | None]) -> str:
    # Written for the error alone: a compiler that sees a length in a string takes it for a constant.
    return " ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
