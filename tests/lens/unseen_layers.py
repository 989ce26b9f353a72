"""Attention that is easy to miss, beside one that is seen: written in the style of libraries that do it."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import Attention

DIM, N, BATCH = 8, 6, 2


class Layer(nn.Module):
    """Attention by a function of q, k and v."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(DIM, 3 * DIM), attend

    def forward(self, x):
        return x + self.attend(*self.qkv(x).chunk(3, -1))


class Beside(nn.Module):
    """A layer that is seen, then another."""

    def __init__(self, other):
        super().__init__()
        self.seen, self.other = Attention(DIM, heads=2), other

    def forward(self, x):
        return self.other(self.seen(x))


def exp_over_sum(q, k, v):
    e = (q @ k.mT).exp()
    return e / e.sum(-1, keepdim=True) @ v


def log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


def logsumexp(q, k, v):
    s = q @ k.mT
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


def relu(q, k, v):
    return F.relu(q @ k.mT) / N @ v


def squared_relu(q, k, v):
    return F.relu(q @ k.mT).square() / N @ v


def sigmoid(q, k, v):
    return torch.sigmoid(q @ k.mT) @ v


def softmax_plus_one(q, k, v):
    e = (q @ k.mT).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def special(q, k, v):
    return torch.special.softmax(q @ k.mT, -1) @ v


def over_heads(q, k, v):
    def one(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    return torch.vmap(one)(q, k, v)


def script(function):
    """Script a function without the warning that PyTorch would rather compile it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


@script
def scripted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1), v)


@script
def scripted_softmax(s: Tensor) -> Tensor:
    return torch.softmax(s, -1)


def written_out(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


class MSDeformAttn(nn.Module):
    """Weights over three points of a feature map, sampled by bilinear interpolation, as detectors do."""

    def __init__(self):
        super().__init__()
        self.offsets, self.weights = nn.Linear(DIM, 6), nn.Linear(DIM, 3)

    def forward(self, x):
        b, n, d = x.shape
        image = x.mT.reshape(b, d, 2, n // 2)
        points = self.offsets(x).tanh().reshape(b, n, 3, 2)
        sampled = F.grid_sample(image, points, align_corners=False)  # b d n points
        return x + (sampled * self.weights(x).softmax(-1)[:, None]).sum(-1).mT


class GATConv(nn.Module):
    """Softmax over the edges into each node, by scatter, as graph libraries do."""

    def __init__(self):
        super().__init__()
        self.lin, self.score = nn.Linear(DIM, DIM), nn.Linear(2 * DIM, 1)

    def forward(self, x):
        b, n, d = x.shape
        x = self.lin(x).reshape(b * n, d)
        source = torch.arange(b * n).repeat_interleave(2)
        target = source.roll(-1)
        e = F.leaky_relu(self.score(torch.cat([x[source], x[target]], -1))).exp()
        total = torch.zeros(b * n, 1).index_add(0, target, e)
        return x.index_add(0, target, e / total[target] * x[source]).reshape(b, n, d)


class AttentionPool(nn.Module):
    """Pairs of positions are averaged by a softmax over the pair, as in enformer."""

    def __init__(self):
        super().__init__()
        self.to_attn_logits = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x.unflatten(1, (-1, 2))
        return (x * self.to_attn_logits(x).softmax(2)).sum(2)


class Compiled(nn.Module):
    """Its forward is compiled."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


def renamed(kind: type) -> type:
    """The same class by a name that says nothing."""
    return type("Block", (kind,), {})


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, N, DIM, generator=torch.Generator().manual_seed(seed))
