"""A matrix cut into blocks: batch rows and heads that share a block keep masks of their own."""

import pytest
import torch

from regard import Blocks, Global, Near, Padding, Window, weights
from regard.ops.blocks import prepared_call

B, H, N = 3, 2, 40
LAYOUT = torch.zeros(B, H, 5, 5, dtype=torch.bool)
LAYOUT[0, 1], LAYOUT[1, 0], LAYOUT[2, :, :, 2] = True, torch.eye(5, dtype=torch.bool), True


@pytest.fixture(autouse=True)
def small_tiles_in_large_blocks(monkeypatch):
    monkeypatch.setattr(prepared_call, "ROWS_PER_BLOCK", 16)
    monkeypatch.setattr(prepared_call, "KEYS_PER_TILE", 8)


@pytest.mark.parametrize(
    "mask",
    [
        Padding((3, 40, 0)),
        Padding(torch.arange(N) >= torch.tensor([[30], [0], [40]])),
        Near(torch.tensor([0.0, 20.0, 90.0])[:, None, None], 4),
        Near(torch.tensor([0.0, 37.0])[:, None], 4),
        Blocks(LAYOUT, 8),
        Global((0, N - 1)) | Window(2),
    ],
    ids=repr,
)
def test_rows_of_one_block_see_what_their_own_mask_shows(mask):
    q, k = torch.randn(2, B, H, N, 4)
    A = weights(q, k, mask=mask)
    blocks = [piece.block for piece in prepared_call.planned_blocks(prepared_call.prepare(A._call))]
    assert all(block.batch == slice(0, B) and block.heads == slice(0, H) for block in blocks)
    seen = mask(*torch.meshgrid(*map(torch.arange, (B, H, N, N)), indexing="ij"))
    assert torch.equal(A.dense() > 0, seen)
    torch.testing.assert_close(A.dense().sum(-1), seen.any(-1).float())
