"""Interpret block masks of FlexAttention tile by tile, as a fused kernel does.

A block mask lists full tiles, and partial tiles for which its `mask_mod` is evaluated; all other tiles are empty. A
causal mask over N tokens has N / 128 partial tiles; evaluating every pair instead would take many times as long as the
attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...ops.terms.coordinates import Block, Point
from ...ops.terms.mask_tiles import Grid
from ...ops.terms.masks.mask_algebra import Mask
from .flex_mod_probe import Mod, all_at_once, rows_of
from .infer_mask import ENTRIES, Edges, Rows


def rows_of_blocks(blocks: BlockMask, shape: tuple[int, int, int, int], device: torch.device) -> Rows:
    """Return the pairs that a block mask shows: by its tiles if its `mask_mod` agrees with them, else by `mask_mod`."""
    mod: Mod = blocks.mask_mod
    return read_tiles(blocks, shape, device) or rows_of(mod, shape, device)


def by_blocks(blocks: BlockMask) -> Mod:
    """Return the pairs that a fused kernel shows, as a function: full tiles, and `mask_mod` within partial tiles."""
    partial, full = _lists(blocks)
    high, wide = blocks.BLOCK_SIZE

    def at(which: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return which[b.clamp(max=which.shape[0] - 1), h.clamp(max=which.shape[1] - 1), i // high, j // wide]

    def is_shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (at(partial, b, h, i, j) & blocks.mask_mod(b, h, i, j)) | at(full, b, h, i, j)

    return is_shown


@dataclass(frozen=True, eq=False)
class Tiled(Rows):
    """A boolean matrix, the same for all heads, whose tiles are full, empty or partial."""

    mod: Mod  # evaluated within partial tiles
    partial: Tensor  # b rows cols, in tiles
    full: Tensor
    size: tuple[int, int]

    def merge_equal_dims(self) -> Rows:
        return self

    def edges(self) -> Edges:
        i, j = self.shape[2:]
        high, wide = self.size
        column = torch.arange(self.full.shape[2], device=self.device) * wide
        first = torch.where(self.full, column, j).amin(2).repeat_interleave(high, 1)[:, :i].contiguous()
        last = torch.where(self.full, (column + wide).clamp(max=j) - 1, -1).amax(2).repeat_interleave(high, 1)[:, :i]
        last, keep = last.contiguous(), self.full.any(1).repeat_interleave(wide, 1)[:, :j].contiguous()
        everything = bool((self.full | self.partial).all())
        for tile, seen in self._looked_into(self.partial.nonzero()):
            row, key = self._places(tile)
            everything = everything and bool((seen | (row >= i) | (key >= j)).all())
            row, key = (row + tile[:, :1, None] * i).squeeze(2), (key + tile[:, :1, None] * j).squeeze(1)
            some = seen.any(2)
            begin = tile[:, 2, None] * wide
            values = seen.to(torch.uint8)
            first.view(-1).scatter_reduce_(0, row[some], (begin + values.argmax(2))[some], "amin")
            end = begin + wide - 1 - values.flip(2).argmax(2)
            last.view(-1).scatter_reduce_(0, row[some], end[some], "amax")
            keep.view(-1)[key[seen.any(1)]] = True
        some = last >= 0
        return Edges(torch.where(some, first, 0), torch.where(some, last, j - 1), some, keep, everything)

    def are_those_of(self, mask: Mask, offset: int) -> bool:
        b, _, i, j = self.shape
        whole = Block(
            slice(0, b), slice(0, 1), slice(0, i), slice(0, j), 1, offset, self.device, torch.float32,
            torch.empty(0, device=self.device),
        )  # fmt: skip
        some, full = (x.expand(b, 1, *self.full.shape[1:])[:, 0] for x in mask.tiles(Grid(whole, *self.size)))
        empty = ~(self.full | self.partial)
        if bool(((self.full & ~some) | (empty & full)).any()):
            return False
        for tile, seen in self._looked_into((~((self.full & full) | (empty & ~some))).nonzero()):
            row, key = self._places(tile)
            batch = tile[:, 0, None, None]
            said = mask.over(Point(batch, torch.zeros_like(batch), row.clamp(max=i - 1), key.clamp(max=j - 1), offset))
            if not torch.equal(said & (row < i) & (key < j), seen):
                return False
        return True

    def _looked_into(self, tiles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tiles in chunks, `t 3`, with the visible pairs of each, `t rows keys`; pairs past the end are False."""
        i, j = self.shape[2:]
        for tile in tiles.split(max(1, ENTRIES // (self.size[0] * self.size[1]))):
            row, key = self._places(tile)
            batch = tile[:, 0, None, None]
            shown = self.mod(batch, torch.zeros_like(batch), row.clamp(max=i - 1), key.clamp(max=j - 1))
            partial, full = (x[tuple(tile.T)][:, None, None] for x in (self.partial, self.full))
            yield tile, ((partial & shown) | full) & (row < i) & (key < j)

    def _places(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row and key indices of tiles, `t rows 1` and `t 1 keys`."""
        row, key = (torch.arange(n, device=self.device) for n in self.size)
        return (
            (tile[:, 1, None] * self.size[0] + row).unsqueeze(2),
            (tile[:, 2, None] * self.size[1] + key).unsqueeze(1),
        )


def read_tiles(blocks: BlockMask, shape: tuple[int, int, int, int], device: torch.device) -> Tiled | None:
    """Return the pairs that the tiles show, if `mask_mod` agrees on nine pairs of each full and empty tile.

    Returns None if it does not agree, if heads differ, or if `mask_mod` takes one pair at a time.
    """
    b, h, i, j = shape
    mod: Mod = blocks.mask_mod
    partial, full = _lists(blocks)
    size = blocks.BLOCK_SIZE
    tiles = [-(-n // of) for n, of in zip((i, j), size, strict=True)]
    if not (b * h * i * j and partial.shape[0] in (1, b) and partial.shape[1] == 1):
        return None
    if partial.shape[2] < tiles[0] or partial.shape[3] < tiles[1]:
        return None
    alike = all_at_once(mod, shape, device)
    if alike is None or alike[1] > 1 or alike[0] > partial.shape[0]:
        return None
    partial, full = (x[:, 0, : tiles[0], : tiles[1]] for x in (partial, full))

    def block(start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop, device=device)[:, None]
        batch = torch.arange(len(partial), device=device)[:, None, None, None]
        return by_blocks(blocks)(batch, torch.zeros_like(batch), rows, torch.arange(j, device=device))

    found = Tiled((len(partial), 1, i, j), block, device, mod, partial, full, size)
    return found if _agrees_at_corners(found) else None


def _agrees_at_corners(rows: Tiled) -> bool:
    """True if `mask_mod` agrees with the lists at the corners, edge centers and center of each full and empty tile."""
    b, _, i, j = rows.shape
    row, key = (_corners(n, size, rows.device) for n, size in zip((i, j), rows.size, strict=True))
    key, batch = key.view(1, -1, 1, 3), torch.arange(b, device=rows.device).view(-1, 1, 1, 1, 1)
    step = max(1, ENTRIES // (b * 3 * key.numel()))
    for at in range(0, len(row), step):
        said = rows.mod(batch, torch.zeros_like(batch), row[at : at + step].view(-1, 1, 3, 1), key)
        partial, full = (x[:, at : at + step, :, None, None] for x in (rows.partial, rows.full))
        if not bool((partial | (said == full)).all()):
            return False
    return True


def _corners(n: int, size: int, device: torch.device) -> Tensor:
    """Return the first, middle and last index of each tile along a side of n."""
    first = torch.arange(0, n, size, device=device)[:, None]
    return (first + torch.tensor([0, size // 2, size - 1], device=device)).clamp(max=n - 1)


def _lists(blocks: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the partial and the full tiles of a block mask, `b h rows cols`."""
    partial = _tiles_from_lists(blocks.kv_num_blocks, blocks.kv_indices)
    if blocks.full_kv_num_blocks is None or blocks.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    return partial, _tiles_from_lists(blocks.full_kv_num_blocks, blocks.full_kv_indices)


def _tiles_from_lists(count: Tensor, places: Tensor) -> Tensor:
    """Return a boolean per tile from the lists of a block mask: the first `count` columns of each row of tiles."""
    columns = places.shape[-1]
    listed = torch.where(torch.arange(columns, device=count.device) < count[..., None], places, columns).long()
    tiles = torch.zeros(*count.shape, columns + 1, dtype=torch.bool, device=count.device)
    return tiles.scatter(-1, listed, True)[..., :columns]
