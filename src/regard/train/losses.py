"""Protocol of a loss with a sum and a count."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Summed(Protocol):
    """A loss summed over its items, and their count, so that batches of any sizes are averaged over all items.

    `regard.nn.cross_entropy` returns one; any object with these two attributes works.
    """

    @property
    def sum(self) -> Tensor: ...
    @property
    def count(self) -> Tensor | int: ...
