"""Attention that models write out themselves, in the ways people write it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import capture

B, H, N, D = 2, 3, 7, 4


DIM = H * D


class Layer(nn.Module):
    """Projects, attends by a function, and remembers the weights, b h i j, that the function says it used."""

    def __init__(self, attention, *, heads=H):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.num_heads, self.attention, self.found = heads, attention, None

    def forward(self, x, memory=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if memory is not None:
            _, k, v = self.qkv(memory).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed, self.found = self.attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def hidden(q, k):
    """True where a key comes after the query."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)


def nano_gpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = F.softmax(att.masked_fill(hidden(q, k), float("-inf")), dim=-1)
    return F.dropout(att, 0.1, training=False) @ v, att


def annotated(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~hidden(q, k) == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    return torch.matmul(p_attn, v), p_attn


def additive_mask(q, k, v):
    mask = torch.zeros(N, N).masked_fill(hidden(q, k), torch.finfo(q.dtype).min)
    scores = torch.matmul(q, k.mT) / math.sqrt(D)
    scores = scores + mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v), weights


def in_place(q, k, v):
    scores = torch.matmul(q, k.mT)
    scores /= math.sqrt(D)
    scores += 0.25
    scores.masked_fill_(hidden(q, k), -1e4)
    weights = torch.softmax(scores, -1)
    return weights @ v, weights


def by_index(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    scores[hidden(q, k).expand_as(scores)] = -torch.inf
    weights = scores.softmax(-1)
    return weights @ v, weights


def chosen(q, k, v):
    scores = 0.5 * (q @ k.mT)
    weights = torch.where(hidden(q, k), torch.tensor(-1e30), scores).softmax(-1)
    return weights @ v, weights


def chosen_the_other_way(q, k, v):
    scores = torch.where(~hidden(q, k), q @ k.mT * 0.5, -1e30)
    weights = nn.Softmax(dim=-1)(scores)
    return torch.nan_to_num(weights) @ v, weights


def stable(q, k, v):
    scores = q @ k.mT * 0.5
    scores = scores.masked_fill(hidden(q, k), -torch.inf)
    weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)
    return weights.masked_fill(hidden(q, k), 0.0) @ v, weights


def einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
    weights = scores.masked_fill(hidden(q, k), -torch.finfo(scores.dtype).max).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v), weights


def einsum_by_tokens(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", [q, k]).masked_fill(torch.ones(N, N).triu(1) == 1, -1e20)
    weights = torch.softmax(scores / D**0.5, dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [weights, v]).transpose(1, 2), weights


def flat(q, k, v):
    """Heads in the batch, and a mask over a view that has them apart."""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = torch.bmm(q * D**-0.5, k.transpose(1, 2))
    scores = scores.view(B, H, N, N) + torch.zeros(B, 1, N, N).masked_fill(hidden(q, k), -torch.inf)
    weights = F.softmax(scores.view(B * H, N, N), dim=-1)
    return torch.bmm(weights, v).view(B, H, N, D), weights.view(B, H, N, N)


def flat_throughout(q, k, v):
    """Heads in the batch, which the layer tells by `num_heads`."""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = torch.baddbmm(torch.empty(B * H, N, N), q, k.mT, beta=0, alpha=D**-0.5)
    weights = scores.masked_fill(hidden(q, k), -1e9).softmax(-1)
    return (weights @ v).unflatten(0, (B, H)), weights.unflatten(0, (B, H))


def keys_first(q, k, v):
    scores = (k @ q.mT).masked_fill(hidden(q, k).mT, -torch.inf) * D**-0.5
    weights = scores.softmax(-2)
    return (v.mT @ weights).mT, weights.mT


def values_first(q, k, v):
    weights = (q @ k.mT * D**-0.5).masked_fill(hidden(q, k), -torch.inf).softmax(-1)
    return (v.transpose(2, 3) @ weights.permute(0, 1, 3, 2)).mT, weights


CAUSAL = (
    nano_gpt,
    annotated,
    additive_mask,
    in_place,
    by_index,
    chosen,
    chosen_the_other_way,
    stable,
    einsum,
    einsum_by_tokens,
    flat,
    flat_throughout,
    keys_first,
    values_first,
)


def watched(layer, *args, **options):
    with capture(layer, **options) as tape, torch.no_grad():
        layer(*args)
    (name,) = tape
    return tape, tape[name]


def close(told, found):
    torch.testing.assert_close(told[:], found, atol=1e-6, rtol=1e-5)


def attention(change):
    """Attention whose scores a function changes between the product and the softmax."""

    def attend(q, k, v):
        weights = change(q @ k.mT * D**-0.5).softmax(-1)
        return weights @ v, weights

    return attend


def distances(n=N):
    return torch.arange(n)[:, None] - torch.arange(n)
