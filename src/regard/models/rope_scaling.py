"""RoPE scaling: rotary frequencies for a longer context than that of the first training.

Each class maps the frequencies of a `Rotary`, highest first. `amplitude` multiplies its cosines and sines, and a class
with `by_length = True` receives the length of the text too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import check_flag, check_int, check_number


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


@dataclass(frozen=True, kw_only=True)
class LinearStretch:
    """Position interpolation: every frequency is divided by `factor` (Chen et al. 2023).

    >>> LinearStretch(factor=4.0)(torch.tensor([1.0, 0.5]))
    tensor([0.2500, 0.1250])
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)

    def __call__(self, frequencies: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicStretch:
    """Dynamic NTK scaling: texts longer than `original` lower the frequencies by their length.

    With n = max(length, original), frequency m of P is multiplied by (factor n / original - factor + 1)^(-m / (P - 1)).
    The length is that of each batch row up to its last position, so a cache keeps keys that earlier calls rotated by
    shorter lengths, as transformers does.
    """

    by_length: ClassVar[bool] = True

    factor: float
    original: int

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)
        check_int("original", self.original, least=1)
        if self.factor < 1:
            raise ValueError(f"factor must be 1 or more, got {self.factor}")

    def __call__(self, frequencies: Float[Tensor, " pairs"], length: Tensor) -> Tensor:
        growth = self.factor * length.clamp(min=self.original) / self.original - (self.factor - 1)
        pairs = frequencies.shape[-1]
        share = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype) / max(1, pairs - 1)
        return frequencies * growth.to(frequencies.dtype) ** -share


@dataclass(frozen=True, kw_only=True)
class YarnStretch:
    """YaRN: slow frequencies are divided by `factor`, fast ones kept, and scores sharpened (Peng et al. 2023).

    A frequency with more than `fast` turns within `original` positions is kept, one with less than `slow` is divided,
    and those between are interpolated along their number; with `truncate` these bounds are whole numbers.
    `amplitude` multiplies cosines and sines, by default 0.1 ln(factor) + 1.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    amplitude: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)
        check_int("original", self.original, least=1)
        check_number("fast", self.fast, above=0)
        check_number("slow", self.slow, above=0)
        check_flag("truncate", self.truncate)
        if self.amplitude is None:
            object.__setattr__(self, "amplitude", yarn_amplitude(self.factor))
        check_number("amplitude", self.amplitude, above=0)

    def __call__(self, frequencies: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        pairs = frequencies.shape[-1]
        if pairs < 2:
            return frequencies / self.factor
        step = math.log(frequencies[0].item() / frequencies[1].item())  # between neighbouring pairs
        low, high = (math.log(self.original / (2 * math.pi * turns)) / step for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high = high + 0.001 if low == high else high
        number = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        slow = ((number - low) / (high - low)).clamp(0, 1)
        return frequencies * (1 - slow + slow / self.factor)


def yarn_amplitude(factor: float, share: float = 1.0) -> float:
    """Return 0.1 share ln(factor) + 1, or 1 for a factor of at most 1.

    >>> round(yarn_amplitude(4.0), 4)
    1.1386
    """
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


RopeScaling = Stretch | LinearStretch | DynamicStretch | YarnStretch
