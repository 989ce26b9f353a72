"""Scores with bias and mask, before the normalizer: entries by themselves, differentiable as PyTorch's operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..backends.triton import prepare_with_kernel
from ..call import Call, no_autocast
from ..terms.coordinates import Block
from ..torch_state import run_uncompiled
from .prepared_call import PreparedCall, split_until_uniform
from .reduction import scores
from .tile_weights import PlannedBlock

SCORES_PER_TILE = 2**22


@run_uncompiled
def score_entries(call: Call, ids: Tensor) -> Tensor:
    """The scores of all queries of a call and these keys, `b h i ids`; hidden entries are -inf."""
    with no_autocast(call.q.device):
        b, h, i, _ = call.shape
        prepared = prepare_with_kernel(call, reads_hidden=True)
        step = max(1, SCORES_PER_TILE // max(1, b * h * ids.numel()))
        parts = [
            _tile(prepared, prepared.block(slice(0, b), slice(0, h), slice(start, min(start + step, i)), ids))
            for start in range(0, i, step)
        ]
        return torch.cat(parts, 2) if parts else prepared.q.new_zeros(b, h, 0, ids.numel())


def _tile(prepared: PreparedCall, block: Block) -> Tensor:
    planned = PlannedBlock(block, slice(0, block.j.numel()))
    shape = block.b.numel(), block.h.numel(), block.row.numel(), block.j.numel()
    if prepared.nonfinite_keys is None:
        return scores(prepared, planned).expand(shape)
    tile = prepared.q.new_full(shape, -math.inf)
    for part in split_until_uniform(prepared, planned):
        rows = slice(part.block.rows.start - block.rows.start, part.block.rows.stop - block.rows.start)
        tile[part.block.batch, part.block.heads, rows] = scores(prepared, part)
    return tile
