"""A layer that mixes its tokens by a given function, and what a capture of it leaves off the tape."""

import pytest
import torch
from torch import nn

from regard.lens import capture

B, H, N, D = 2, 3, 10, 4
DIM = H * D


def split(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Mixer(nn.Module):
    """Projects, and mixes by a function of q, k, v, each b n dim; says its number of heads."""

    def __init__(self, mix):
        super().__init__()
        self.num_heads, self.mix = H, mix
        self.qkv, self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, n * DIM) for n in (3, 1, 1, 1))
        self.pixels = nn.Conv1d(DIM, 3 * DIM, 1)
        self.gate, self.seeds = nn.Linear(DIM, 4), nn.Linear(DIM, 5)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.kernel = nn.Parameter(torch.randn(DIM, 4))
        self.words = nn.Parameter(torch.randn(7, DIM))
        self.memory = nn.Parameter(torch.randn(2, H, D, 4))
        self.places = nn.Parameter(torch.randn(2 * N, H, D))
        self.slots = nn.Parameter(torch.randn(4, 2, DIM))
        self.register_buffer("grid", torch.linspace(-1, 1, N)[:, None].expand(N, 2).clone())
        self.register_buffer("cache", torch.zeros(B, N, DIM))

    def forward(self, x):
        return self.mix(self, x)


def left_out(mix):
    """The kinds of what a mixer, beside an attention, does that is not put on the tape."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixer(attention), Mixer(mix)), torch.randn(B, N, DIM)

    def run():
        torch.manual_seed(1)
        return model[0](x), model[1](x)

    with torch.no_grad():
        expected = run()
        with pytest.warns(UserWarning, match="1 was not recorded"), capture(model) as tape:
            again = run()
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert tape.layers == ["0"]
    assert {each.layer for each in tape.unseen} == {"1"}
    return {each.kind for each in tape.unseen}


def attention(m, x):
    q, k, v = map(split, m.qkv(x).chunk(3, -1))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
