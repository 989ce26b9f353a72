"""Layers that call flex_attention, block masks, and inputs for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.lens.kernel_layers import HEADS, WIDTH

N = 10


compiled = torch.compile(flex_attention, backend="eager")


def causal(b, h, i, j):
    return j <= i


def blocks(mask=causal, n=N, m=None, batch=None):
    return create_block_mask(mask, batch, None, n, m or n, device="cpu")


class FlexLayer(nn.Module):
    """Calls it in some way, on what it is called with."""

    def __init__(self, call=None, **given):
        super().__init__()
        self.call, self.given = call, given

    def forward(self, q, k, v):
        return flex_attention(q, k, v, **self.given)


class CompiledFlex(FlexLayer):
    def forward(self, q, k, v):
        return compiled(q, k, v, **self.given)


def flex_inputs(heads=HEADS, groups=HEADS, n=N, m=N, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, count, length, WIDTH) for count, length in ((heads, n), (groups, m), (groups, m))]
