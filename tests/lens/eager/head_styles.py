"""Attention whose heads models keep in many places: loops, folds, stacks; and attention of one head beside them.

Each function gets the layer and x, b n dim, and returns its output and the weights it used, b h i j.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

H, N, D = 4, 6, 3
DIM = H * D
softmax = nn.Softmax(-1)


def kernel_weights(q, k, scale):
    """The weights of a kernel call, where no capture looks."""
    scores = q.detach().numpy() @ k.detach().numpy().swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True)).float()


class ScaledDotProduct(nn.Module):
    def forward(self, q, k, v):
        weights = softmax(torch.bmm(q, k.transpose(1, 2)) * D**-0.5)
        return torch.bmm(weights, v), weights


class Kernel(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=D**-0.5), kernel_weights(q, k, D**-0.5)


class Attend(nn.Module):
    """A layer that says its number of heads, under a name."""

    def __init__(self, attention, *, name="num_heads", product=ScaledDotProduct):
        super().__init__()
        self.attention, self.product = attention, product()
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.each = nn.ModuleList(nn.Linear(DIM, D) for _ in range(3 * H))
        self.shared, self.small, self.scores = nn.Linear(DIM, D), nn.Linear(D, D), nn.Linear(DIM, 1)
        self.seed = nn.Parameter(torch.randn(1, 1, DIM))
        if name is not None:
            setattr(self, name, H)

    def forward(self, x):
        out, self.found = self.attention(self, x)
        return out

    def project(self, x):
        return self.to_q(x), self.to_k(x), self.to_v(x)


def interpretable(m, x):
    """As in the Temporal Fusion Transformer: a projection for each head, one for the values, one call for each."""
    value = m.shared(x)
    heads = [m.product(m.each[2 * n](x), m.each[2 * n + 1](x), value) for n in range(H)]
    return torch.stack([out for out, _ in heads], 2).mean(2), torch.stack([weights for _, weights in heads], 1)


def loop(m, x):
    """A slice of the features for each head."""
    parts = [[t[..., n * D : (n + 1) * D] for t in m.project(x)] for n in range(H)]
    weights = [(q @ k.mT).softmax(-1) for q, k, _ in parts]
    return torch.cat([w @ v for w, (_, _, v) in zip(weights, parts, strict=True)], -1), torch.stack(weights, 1)


def loop_of_products(m, x):
    """A module that is called once for each head."""
    parts = [m.product(*each) for each in zip(*(t.chunk(H, -1) for t in m.project(x)), strict=True)]
    return torch.cat([out for out, _ in parts], -1), torch.stack([weights for _, weights in parts], 1)


def loop_over_heads(m, x):
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in m.project(x))
    parts = [m.product(q[:, n], k[:, n], v[:, n]) for n in range(H)]
    return torch.stack([out for out, _ in parts], 1), torch.stack([weights for _, weights in parts], 1)


def loop_of_kernels(m, x):
    q, k, v = (t.unflatten(-1, (H, D)).unbind(2) for t in m.project(x))
    out = [F.scaled_dot_product_attention(*each) for each in zip(q, k, v, strict=True)]
    weights = [kernel_weights(a, b, D**-0.5) for a, b in zip(q, k, strict=True)]
    return torch.cat(out, -1), torch.stack(weights, 1)


ONE_AT_A_TIME = (interpretable, loop, loop_of_products, loop_over_heads, loop_of_kernels)


def pooled(m, x):
    """A learned query over the tokens."""
    weights = (m.seed @ m.to_k(x).mT).softmax(-1)
    return weights @ m.to_v(x), weights[:, None]


def pooled_by_scores(m, x):
    weights = torch.tanh(m.scores(x)).softmax(1)
    return (weights * x).sum(1), weights.mT[:, None]


def affinity(m, x):
    """One head of attention between two texts."""
    other = m.to_k(x.flip(1))
    weights = torch.bmm(m.to_q(x), other.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, other), weights[:, None]


def unprojected(m, x):
    weights = (x @ x.mT).softmax(-1)
    return weights @ x, weights[:, None]


def kernel_of_one_head(m, x):
    q, k, v = m.project(x)
    return F.scaled_dot_product_attention(q, k, v), kernel_weights(q, k, DIM**-0.5)[:, None]


def unprojected_kernel(m, x):
    return F.scaled_dot_product_attention(x, x, x), kernel_weights(x, x, DIM**-0.5)[:, None]


def windows_of_one_head(m, x):
    q, k, v = (t.unflatten(1, (2, N // 2)) for t in m.project(x))
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights.flatten(0, 1)[:, None]


ONE_HEAD = (
    pooled,
    pooled_by_scores,
    affinity,
    unprojected,
    kernel_of_one_head,
    unprojected_kernel,
    windows_of_one_head,
)


def stacked(m, x):
    """Heads first, stacked from a split of the features."""
    q, k, v = (torch.stack(torch.split(t, D, dim=2)) for t in m.project(x))
    weights = F.softmax(torch.einsum("bnik,bnjk->bnij", q, k), dim=-1)
    return torch.matmul(weights, v), weights.transpose(0, 1)


def heads_outside(m, x):
    q, k, v = (t.view(len(x), N, H, D).permute(2, 0, 1, 3).contiguous().view(-1, N, D) for t in m.project(x))
    out, weights = m.product(q, k, v)
    return out, weights.view(H, len(x), N, N).transpose(0, 1)


def heads_first(m, x):
    q, k, v = (t.view(len(x), N, H, D).permute(2, 0, 1, 3) for t in m.project(x))
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights.transpose(0, 1)


def kernel_of_heads_first(m, x):
    q, k, v = (t.view(len(x), N, H, D).permute(2, 0, 1, 3) for t in m.project(x))
    return F.scaled_dot_product_attention(q, k, v, scale=1.0), kernel_weights(q, k, 1.0).transpose(0, 1)


def sequence_first(m, x):
    """Batch second, and heads within it."""
    q, k, v = (t.contiguous().view(N, len(x) * H, D).transpose(0, 1) for t in m.project(x.transpose(0, 1)))
    weights = torch.bmm(q * D**-0.5, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, v).transpose(0, 1), weights.view(len(x), H, N, N)


def concatenated(m, x):
    q, k, v = (torch.cat(torch.split(t, D, dim=2), dim=0) for t in m.project(x))
    weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / D**0.5, -1)
    out = torch.cat(torch.split(weights @ v, len(x), dim=0), dim=2)
    return out, weights.view(H, len(x), N, N).transpose(0, 1)


def folded(m, x):
    q, k, v = (t.view(len(x), N, H, D).transpose(1, 2).reshape(len(x) * H, N, D) for t in m.project(x))
    out, weights = m.product(q, k, v)
    return out, weights.view(len(x), H, N, N)


def folded_kernel(m, x):
    q, k, v = (t.view(len(x), N, H, D).transpose(1, 2).flatten(0, 1) for t in m.project(x))
    return F.scaled_dot_product_attention(q, k, v, scale=1.0), kernel_weights(q, k, 1.0).view(len(x), H, N, N)


def folded_with_rotation(m, x):
    """Norms, rotations and a cache between the split and the fold."""

    def rotate(t):
        t = F.layer_norm(t, (D,)) if t is not None else t
        return torch.cat((-t[..., 1:], t[..., :1]), -1) * 0.5 + t

    q, k, v = (t.view(len(x), N, H, D).transpose(1, 2) for t in m.project(x))
    q, k = rotate(q), torch.cat((rotate(k)[:, :, :2], rotate(k)[:, :, 2:]), 2)
    q, k, v = (t.reshape(-1, N, D) for t in (q, k, v))
    weights = softmax(q @ k.mT)
    return weights @ v, weights.view(len(x), H, N, N)


def projected_by_head(m, x):
    """A projection that all heads share, after the split."""
    q, k, v = (m.small(x.reshape(len(x), N, H, D)) for _ in range(3))
    weights = torch.softmax(torch.einsum("nqhd,nkhd->nhqk", [q, k]), dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [weights, v]), weights


def in_blocks(m, x):
    """Local attention: heads before as many windows."""
    x = x.repeat(1, 2, 1)
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2).unflatten(2, (H, -1)) for t in m.project(x))
    weights = torch.einsum("bhwid,bhwjd->bhwij", q, k).softmax(-1)
    return torch.einsum("bhwij,bhwjd->bhwid", weights, v), weights.transpose(1, 2).flatten(0, 1)


def in_windows(m, x):
    """Windows in the batch, heads behind them."""
    q, k, v = (
        m.to_q(x.view(len(x), 2, N // 2, DIM).view(-1, N // 2, DIM)).reshape(-1, N // 2, H, D).permute(0, 2, 1, 3)
        for _ in range(3)
    )
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v, weights


def local_heads(m, x):
    """Half of the heads, packed into the batch, in windows that see the one before and the one behind."""
    x = x.repeat(1, 2, 1)
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2)[:, H // 2 :] for t in m.project(x))
    q, k, v = (torch.cat([t.reshape(-1, 2 * N, D)]).unflatten(1, (4, -1)) for t in (q, k, v))
    k, v = (F.pad(t, (0, 0, 0, 0, 1, 1)).unfold(1, 3, 1).movedim(-1, 2).flatten(2, 3) for t in (k, v))
    weights = torch.einsum("bwid,bwjd->bwij", q, k).softmax(-1)
    by_head = weights.unflatten(0, (len(x), H // 2)).transpose(1, 2).flatten(0, 1)
    return torch.einsum("bwij,bwjd->bwid", weights, v), by_head


def of_channels(m, x):
    """Features first, as convolutions have them, and heads behind them in each channel."""
    q, k, v = (F.conv1d(x.mT, t.weight[..., None], t.bias).view(len(x), D, H, N) for t in (m.to_q, m.to_k, m.to_v))
    weights = torch.einsum("bdhn,bdhm->bhnm", q, k).softmax(-1)
    return torch.einsum("bhnm,bdhm->bdhn", weights, v), weights


MANY_HEADS = (
    stacked,
    heads_outside,
    heads_first,
    kernel_of_heads_first,
    sequence_first,
    concatenated,
    folded,
    folded_kernel,
    folded_with_rotation,
    projected_by_head,
    in_blocks,
    in_windows,
    local_heads,
    of_channels,
)
