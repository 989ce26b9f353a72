"""Attention layers over F.scaled_dot_product_attention, and their weights by the definition."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

B, N, D, H = 2, 9, 24, 4


class Layer(nn.Module):
    """Attention as people write it by hand, over `F.scaled_dot_product_attention`."""

    def __init__(self, kv_heads=H, repeat=False):
        super().__init__()
        self.kv_heads, self.repeat = kv_heads, repeat
        self.query, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.key, self.value = (nn.Linear(D, D // H * kv_heads) for _ in range(2))

    def forward(self, x, context=None, **asked):
        context = x if context is None else context
        q, k, v = (
            layer(y).unflatten(-1, (-1, D // H)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, context), (self.value, context))
        )
        if self.repeat:
            k, v = (y.repeat_interleave(H // self.kv_heads, 1) for y in (k, v))
        elif self.kv_heads < H:
            asked["enable_gqa"] = True
        return self.out(F.scaled_dot_product_attention(q, k, v, **asked).transpose(1, 2).flatten(2))


def by_hand(layer, x, context=None, *, mask=None, added=0.0):
    """The definition, in float64."""
    context = x if context is None else context
    q = layer.query(x).double().unflatten(-1, (-1, D // H)).transpose(1, 2)
    k = layer.key(context).double().unflatten(-1, (-1, D // H)).transpose(1, 2)
    k = k.repeat_interleave(H // k.shape[1], 1)
    s = q @ k.mT / math.sqrt(D // H) + added
    return s.masked_fill(~mask, -torch.inf).softmax(-1) if mask is not None else s.softmax(-1)


def tokens(n=N, b=B):
    return torch.randn(b, n, D)


def lower(i, j, top=0):
    return torch.ones(i, j, dtype=torch.bool).tril(top)


def assert_close(A, truth, bound=1e-6):
    assert A.shape == truth.shape
    assert (A.dense().double() - truth).abs().max() < bound


class Stack(nn.Module):
    """Three layers by hand, checkpointed if asked."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList([Layer() for _ in range(3)]), checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Bare(nn.Module):
    """The kernel alone."""

    def forward(self, q, k, **asked):
        return F.scaled_dot_product_attention(q, k, k, **asked)


def plain(q, k):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
