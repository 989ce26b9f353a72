"""What a loss may be: a scalar tensor, or a sum and a count."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Summed(Protocol):
    """The loss summed over its items, and how many they are, so that batches of any sizes are averaged over all items.

    `regard.nn.cross_entropy` returns one; anything with these two will do.
    """

    @property
    def sum(self) -> Tensor: ...
    @property
    def count(self) -> Tensor | int: ...
