"""Rows of different lengths in one cache: where each begins, and texts that follow each other in one row."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import check_int, check_integer_tensor, check_tensor
from ..ops.blocks.tile_weights import additive_mask as hide
from ..ops.terms.masks import Documents, Padding


class RowStarts:
    """The entry at which each row of a cache begins; the rows end together.

    >>> starts = RowStarts(torch.tensor([0, 2]))
    >>> starts.padding(first=0, n=3).keys.tolist()
    [[True, True, True], [False, False, True]]

    Caches of all layers share one object, so that a step makes its mask once.
    """

    def __init__(self, starts: Int[Tensor, " b"]) -> None:
        self.starts = starts
        self.numbers: list[int] = starts.tolist()
        self.last = max(self.numbers, default=0)  # entries from here on belong to every row
        self._padding: tuple[tuple[int, int], Padding] | None = None
        self._mask: Tensor | None = None
        self._chosen: tuple[Tensor, RowStarts] | None = None

    def padding(self, first: int, n: int) -> Padding | None:
        """Return the mask of n entries from `first` on; None if they belong to every row."""
        if first >= self.last:
            return None
        if self._padding is None or self._padding[0] != (first, n):
            self._padding = (first, n), Padding(self._keep(first, n))
        return self._padding[1]

    def additive_mask(self, first: int, n: int, dtype: torch.dtype) -> Float[Tensor, "b 1 1 n"] | None:
        """Return the same mask as numbers to add to scores, 0 or -inf; a view of one tensor for all steps."""
        if first >= self.last:
            return None
        if self._mask is None or self._mask.shape[-1] < first + n or self._mask.dtype != dtype:
            self._mask = hide(self._keep(0, 2 * (first + n)), dtype)[:, None, None]
        return self._mask[..., first : first + n]

    def select(self, rows: Int[Tensor, " rows"]) -> RowStarts:
        """Return the starts of some rows, in their order; a row may repeat."""
        if self._chosen is None or self._chosen[0] is not rows:
            starts = self.starts.index_select(0, rows)
            self._chosen = rows, self if torch.equal(starts, self.starts) else RowStarts(starts)
        return self._chosen[1]

    def _keep(self, first: int, n: int) -> Tensor:
        return torch.arange(first, first + n, device=self.starts.device) >= self.starts[:, None]


class PackedLengths:
    """The lengths of texts that follow each other in one row, without padding between them.

    >>> packed = PackedLengths(torch.tensor([3, 1]))
    >>> packed.texts.tolist(), packed.positions.tolist()
    ([0, 0, 0, 1], [0, 1, 2, 0])

    `width` is the length of the cache that they begin, by default that of the longest text.
    """

    def __init__(self, lengths: Int[Tensor, " b"], *, width: int | None = None) -> None:
        check_tensor("lengths", lengths, hint="torch.tensor([3, 5])")
        check_integer_tensor("lengths", lengths, 1)
        longest = int(lengths.max()) if lengths.numel() else 0
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths must be 0 or more, got {int(lengths.min())}")
        self.lengths: list[int] = lengths.tolist()
        self.width = longest if width is None else width
        check_int("width", self.width, least=longest)
        texts = torch.arange(len(lengths), device=lengths.device)
        self.texts = texts.repeat_interleave(lengths)  # the text of each token
        self.positions = (
            torch.arange(len(self.texts), device=lengths.device) - (lengths.cumsum(0) - lengths)[self.texts]
        )
        self.starts = RowStarts(self.width - lengths)
        self.mask = Documents(self.texts)
