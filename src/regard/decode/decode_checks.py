"""What decoding demands of its numbers: checks that raise with name and value."""

from __future__ import annotations

import math
import numbers

from torch import Tensor


def must_count(name: str, value: object, *, least: int = 0) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")


def must_be_tokens(name: str, tokens: Tensor, vocabulary: int) -> None:
    """Raise unless all tokens are of a vocabulary of that size; on the CPU, where looking costs little."""
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"{name} must be within the vocabulary of {vocabulary}, got {low if low < 0 else high}; "
                "pass tokens the model knows"
            )


def must_be_number(name: str, value: object) -> None:
    """Raise unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
