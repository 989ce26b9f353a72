"""A case of the everyday benchmark: calls that do the same work, and what ours may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Call = Callable[[], object]


class Size(NamedTuple):
    """Where the cases run, and whether they are the small ones that only show that they run."""

    device: torch.device
    dtype: torch.dtype  # half precision on a GPU
    tiny: bool = False

    def of(self, whole: int, tiny: int) -> int:
        """A length of a case, or the small one."""
        return tiny if self.tiny else whole


@dataclass(frozen=True)
class Case:
    """Calls by name; each is compared with the fastest of the baseline, and takes at most its bar times as long."""

    name: str
    build: Callable[[Size], Mapping[str, Call]]
    baseline: tuple[str, ...]
    bars: Mapping[str, float] = field(default_factory=dict)
    grad: bool = False  # the calls differentiate
    takes: float = 4.0  # seconds to build, compile and measure the case on an H200, at most
