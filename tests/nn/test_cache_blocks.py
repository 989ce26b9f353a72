"""Blocks of a cache: what is read is what was written, shared until rows differ, and no more than there is."""

from __future__ import annotations

import torch

from regard.nn.cache_blocks import BlockTable


def table(both: torch.Tensor, size: int = 4, starts: list[int] | None = None) -> BlockTable:
    return BlockTable.empty(both, 2, size).write(0, both, starts)


def read(blocks: BlockTable, first: int, n: int) -> torch.Tensor:
    return torch.cat(blocks.read(first, n), -1)


def test_entries_come_back_from_any_place():
    both = torch.randn(2, 3, 11, 5)
    blocks = table(both[:, :, :6]).write(6, both[:, :, 6:7]).write(7, both[:, :, 7:])
    for first, n in ((0, 11), (3, 5), (4, 4), (10, 1), (5, 0)):
        assert torch.equal(read(blocks, first, n), both[:, :, first : first + n])
    assert [x.shape[-1] for x in blocks.read(0, 1)] == [2, 3]


def test_rows_store_nothing_before_they_begin():
    both = torch.randn(3, 1, 12, 5)
    blocks = table(both, starts=[0, 8, 12])
    assert [[block is not None for block in row] for row in blocks.rows] == [
        [True] * 3,
        [False, False, True],
        [False] * 3,
    ]
    assert not read(blocks, 0, 12)[1, :, :8].any()
    assert torch.equal(read(blocks, 0, 12)[1, :, 8:], both[1, :, 8:])
    assert torch.equal(read(blocks.write(12, both[:, :, :1]), 12, 1), both[:, :, :1])


def test_the_second_to_write_an_entry_copies_the_block():
    both, a, b = torch.randn(1, 1, 6, 5), torch.randn(1, 1, 1, 5), torch.randn(1, 1, 1, 5)
    blocks = table(both)
    first, second = blocks.write(6, a), blocks.write(6, b)
    assert first.rows[0][1] is blocks.rows[0][1]
    assert second.rows[0][1] is not blocks.rows[0][1]
    assert second.rows[0][0] is blocks.rows[0][0]
    assert torch.equal(read(first, 6, 1), a)
    assert torch.equal(read(second, 0, 7), torch.cat((both, b), 2))


def test_rows_are_selected_and_first_blocks_dropped_without_a_copy():
    both = torch.randn(2, 1, 9, 5)
    blocks = table(both)
    chosen = blocks.select(torch.tensor([1, 1, 0]))
    assert chosen.blocks == blocks.blocks
    assert torch.equal(read(chosen, 0, 9), both[[1, 1, 0]])
    assert torch.equal(read(blocks.without_first(1), 0, 5), both[:, :, 4:])
