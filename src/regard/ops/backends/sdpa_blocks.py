"""PyTorch's fused kernel on the CPU over blocks of rows, each with its part of the mask and the bias as a tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import torch_internals
from ..blocks.prepared_call import PreparedCall, planned_blocks, prepare
from ..blocks.reduction import PLACEHOLDER, DifferentiableOnce, clone_if_inference
from ..blocks.tile_weights import additive_tile
from ..call import Call
from ..terms.coordinates import Block, add_entries, take_entries
from ..torch_state import check_single_gradient, run_uncompiled
from .torch_kernels import with_equal_widths

INF = float("inf")


@run_uncompiled
def run_blocks(call: Call) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row, `b h i 1`, of a call whose hidden keys are finite."""
    assert call.v is not None
    prepared = prepare(call, finite=True)
    q, k, v = with_equal_widths(prepared.q, prepared.k, call.v.to(call.dtype))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = BlockwiseSdpa.apply(prepared, q, k, v)
    return out[..., : call.v.shape[-1]].to(call.v.dtype), lse


class BlockwiseSdpa(torch.autograd.Function):
    """softmax(q k^T + tile) v over the blocks of a prepared call; b h i d, b g j d, b g j d -> b h i d and b h i 1."""

    @staticmethod
    def forward(ctx: Any, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:3], 1), -INF)
        for block, added in _parts(prepared):
            rows, keys = _indices(block, k)
            part, total = torch_internals.cpu_flash_attention(
                q[rows], take_entries(k, keys), take_entries(v, keys), scale=1.0, added=added
            )
            out[rows] = part
            # The kernel takes the sum of an empty row as 1.
            empty = False if added is None else (added == -INF).all(-1)
            lse[rows] = torch.where(torch.as_tensor(empty), -INF, total)[..., None]
        ctx.prepared = prepared.map_tensors(lambda _: PLACEHOLDER)
        ctx.save_for_backward(q, k, v, out, lse, *(clone_if_inference(x.detach()) for x in prepared.tensors()))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        q, k, v, out, lse, *kept = ctx.saved_tensors
        queue = iter(kept)
        prepared = ctx.prepared.map_tensors(lambda _: next(queue))
        grad = grad.contiguous()
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        with torch.no_grad():
            for block, added in _parts(prepared):
                rows, keys = _indices(block, k)
                # A row that sees nothing has no weights to differentiate; 0 keeps the kernel from -inf - -inf.
                total = torch.where(lse[rows] == -INF, 0.0, lse[rows]).squeeze(-1)
                parts = torch_internals.cpu_flash_attention_backward(
                    grad[rows],
                    q[rows],
                    take_entries(k, keys),
                    take_entries(v, keys),
                    out[rows],
                    total,
                    scale=1.0,
                    added=added,
                )
                for total_grad, index, part in zip(grads, (rows, keys, keys), parts, strict=True):
                    add_entries(total_grad, index, part)
        if torch.is_grad_enabled():
            grads = [DifferentiableOnce.apply(g, grad, q, k, v) for g in grads]
        return None, *grads


def _parts(prepared: PreparedCall) -> Iterator[tuple[Block, Tensor | None]]:
    """Blocks, each with the tile of bias and mask that is added to its scores."""
    for planned in planned_blocks(prepared):
        block = planned.block
        added = additive_tile(prepared, block, prepared.q.dtype, masked=planned.masked is not None)
        yield block, None if added is None else added.expand(block.b.numel(), -1, -1, -1)


def _indices(block: Block, k: Tensor) -> tuple[Any, Any]:
    rows = block.batch, block.heads, block.rows
    return rows, (block.batch, block.head_slice(k.shape[1]), block.cols)
