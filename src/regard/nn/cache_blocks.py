"""Storage of a cache in blocks of tokens that rows share until they differ."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(eq=False)
class TokenBlock:
    """Keys and values of some consecutive entries of a row; `written` of them hold numbers."""

    both: Float[Tensor, "g size d_and_e"]
    written: int = 0


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of each row, None where a row has not begun: entry n is in block n // size.

    A table never changes: writing returns another one. Rows and tables that share a block write to it in turn: the
    first to write an entry continues in the block, the others in a copy. A block that no table holds is freed.
    """

    rows: list[list[TokenBlock | None]]
    widths: tuple[int, int]  # d e
    size: int
    like: Tensor = field(repr=False)  # 0 g 0 d_and_e: heads, width, dtype and device

    @staticmethod
    def empty(both: Float[Tensor, "b g n d_and_e"], d: int, size: int) -> BlockTable:
        rows: list[list[TokenBlock | None]] = [[] for _ in range(both.shape[0])]
        return BlockTable(rows, (d, both.shape[3] - d), size, both.new_empty(0, both.shape[1], 0, both.shape[3]))

    @property
    def shape(self) -> tuple[int, int, int]:
        """b g d_and_e."""
        return len(self.rows), self.like.shape[1], self.like.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def blocks(self) -> set[int]:
        """The ids of the blocks that are stored."""
        return {id(block) for row in self.rows for block in row if block is not None}

    def write(self, first: int, both: Float[Tensor, "b g n d_and_e"], starts: list[int] | None = None) -> BlockTable:
        """Return the table with entries from `first` on; row r begins at `starts[r]`."""
        starts = [0] * len(self.rows) if starts is None else starts
        rows = [self._write_row(row, first, x, start) for row, x, start in zip(self.rows, both, starts, strict=True)]
        return BlockTable(rows, self.widths, self.size, self.like)

    def read(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        """Return n keys and values of each row, 0 where a row has not begun."""
        b, g, width = self.shape
        both = self.like.new_zeros(b, g, n, width)
        for m in range(first // self.size, -(-(first + n) // self.size)):
            start, end = max(first, m * self.size), min(first + n, (m + 1) * self.size)
            for row, blocks in enumerate(self.rows):
                if (block := blocks[m]) is not None:
                    within = slice(start - m * self.size, end - m * self.size)
                    both[row, :, start - first : end - first] = block.both[:, within]
        k, v = both.split_with_sizes(self.widths, 3)
        return k, v

    def select(self, rows: Tensor) -> BlockTable:
        """Return the table of some rows, in their order; no entry is copied."""
        return BlockTable([list(self.rows[row]) for row in rows.tolist()], self.widths, self.size, self.like)

    def without_first(self, blocks: int) -> BlockTable:
        """Return the table without the first blocks of each row."""
        return BlockTable([row[blocks:] for row in self.rows], self.widths, self.size, self.like)

    def _write_row(self, row: list[TokenBlock | None], first: int, both: Tensor, start: int) -> list[TokenBlock | None]:
        row, end = list(row), first + both.shape[1]
        for m in range(first // self.size, -(-end // self.size)):
            left, right = max(first, m * self.size), min(end, (m + 1) * self.size)
            if right <= start:
                row.append(None)
                continue
            block = row[m] if m < len(row) else None
            at = left - m * self.size
            if block is None or block.written != at:
                with torch.inference_mode(False):  # a normal tensor can be written in and outside of inference mode
                    storage = self.like.new_zeros(self.like.shape[1], self.size, self.like.shape[3])
                if block is not None:
                    storage[:, :at] = block.both[:, :at]
                block = TokenBlock(storage, at)
            block.both[:, at : right - m * self.size] = both[:, left - first : right - first]
            block.written = right - m * self.size
            if m < len(row):
                row[m] = block
            else:
                row.append(block)
        return row
