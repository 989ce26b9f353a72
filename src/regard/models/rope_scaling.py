"""RoPE scaling: rotary frequencies for a longer context than that of the first training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ..checks import check_int, check_number


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """RoPE scaling of Llama 3.1: rotary frequencies for a context longer than that of the first training.

    A frequency with less than `low` turns within `original` positions is divided by `factor`, one with more than `high`
    turns is not changed, and those between are interpolated.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)
        check_number("low", self.low)
        check_number("high", self.high)
        check_int("original", self.original, least=1)
        if not 0 < self.low < self.high:
            raise ValueError(f"low and high must be 0 < low < high, got low={self.low} and high={self.high}")

    def __call__(self, frequencies: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        turns = frequencies * (self.original / (2 * math.pi))
        whole = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (whole + (1 - whole) / self.factor)
