"""WrittenRows: rows of weights that a model computed by itself, to be compared with those of its queries and keys.

A small comparison takes longer to start than to run, so those of all layers are made together, before anything of the
tape is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .store import version_of

TOGETHER = 16  # layers that are compared at once; their keys are copied


class WrittenRows(NamedTuple):
    """Rows of the weights of one attention, and the queries and keys that are recorded for it."""

    q: Tensor  # b h i d
    k: Tensor  # b h j d
    found: Tensor  # b h rows j
    rows: slice
    scale: float
    version: int | None  # q and k had this version when they were recorded

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that rows share if they are compared together."""
        return self.q.shape, self.k.shape, self.q.dtype, self.q.device, self.rows.start, self.rows.step, self.scale

    @property
    def is_overwritten(self) -> bool:
        """Whether the queries or keys were written to since; the tape refuses to show them."""
        return not version_of(self.q) == version_of(self.k) == self.version


def have_weights(written: Sequence[WrittenRows], tolerance: float) -> list[bool]:
    """Whether the rows of each attention are the softmax of its scores, to an error relative to the largest weight.

    The largest weight of a row is at least 1 / j, so an error that is small beside that is small in each row.
    """
    verdicts = [True] * len(written)
    for numbers in _alike(written):
        some = [written[n] for n in numbers]
        q = torch.stack([each.q for each in some])[:, :, :, some[0].rows]
        k, found = torch.stack([each.k for each in some]), torch.stack([each.found for each in some])
        A = torch.softmax((q @ k.mT).mul_(some[0].scale), -1)
        off = A.sub_(found).flatten(1).norm(dim=1) * A.shape[-1]
        for n, each in zip(numbers, off.tolist(), strict=True):
            verdicts[n] = each <= tolerance
    return verdicts


def _alike(written: Sequence[WrittenRows]) -> Iterator[list[int]]:
    kinds: dict[Any, list[int]] = {}
    for n, each in enumerate(written):
        if not each.is_overwritten:
            kinds.setdefault(each.kind, []).append(n)
    for numbers in kinds.values():
        yield from (numbers[n : n + TOGETHER] for n in range(0, len(numbers), TOGETHER))
