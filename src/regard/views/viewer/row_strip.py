"""Strip: the rows of a tensor on another device, each brought there when it is first needed, and once."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 4096  # rows brought at a time


class Strip:
    """A tensor of dims 1 1 n d that fills as it is read; `here` holds what came so far."""

    def __init__(self, source: Tensor, device: torch.device) -> None:
        self.here = torch.empty(source.shape, dtype=source.dtype, device=device)
        self._source = source
        self._missing = set(range(-(-source.shape[2] // PIECE)))

    def need(self, rows: slice | Tensor) -> None:
        """See that these rows are here."""
        if isinstance(rows, slice):
            pieces = range(rows.start // PIECE, -(-rows.stop // PIECE))
        else:
            pieces = (rows // PIECE).unique().tolist()
        for piece in sorted(self._missing.intersection(pieces)):
            some = slice(piece * PIECE, (piece + 1) * PIECE)
            self.here[:, :, some] = self._source[:, :, some]
            self._missing.remove(piece)
