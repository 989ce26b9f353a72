"""Self-attention beside recurrent and convolutional layers: how many layers lie between two tokens, and the time.

Prints, for layers of width 64, how many layers and steps one after the other it takes until the last of 64 tokens
depends on the first, and the time of a forward and a backward pass over 256, 1,024 and 4,096 tokens.
"""

import time
import timeit

import torch
from torch import nn

from regard import Causal, Window
from regard.nn import Attention

torch.manual_seed(0)
DIM, TOKENS, LENGTHS = 64, 64, (256, 1024, 4096)


class Convolution(nn.Module):
    """A causal convolution over the tokens, b n dim."""

    def __init__(self, kernel, dilation=1):
        super().__init__()
        self.past = dilation * (kernel - 1)
        self.layer = nn.Conv1d(DIM, DIM, kernel, dilation=dilation)

    def forward(self, x):
        return self.layer(nn.functional.pad(x.mT, (self.past, 0))).mT


class Recurrent(nn.Module):
    """An LSTM over the tokens, b n dim."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


LAYERS = {  # the layer at a depth
    "self-attention": lambda depth: Attention(DIM, 4, mask=Causal()),
    "attention in a window of 8": lambda depth: Attention(DIM, 4, mask=Causal() & Window(8)),
    "LSTM": lambda depth: Recurrent(),
    "convolution of 3": lambda depth: Convolution(3),
    "convolution of 3, dilated": lambda depth: Convolution(3, 2**depth),
}


def layers_between(make):
    """How many layers it takes until the last token depends on the first."""
    x = torch.randn(1, TOKENS, DIM, requires_grad=True)
    y, depth = x, 0
    while True:
        y, depth = make(depth)(y), depth + 1
        [slopes] = torch.autograd.grad(y[0, -1].sum(), x, retain_graph=True)
        if slopes[0, 0].abs().sum() > 0:
            return depth


def milliseconds(layer, tokens):
    """The best of three runs forward and backward over one text, in processor time."""
    x = torch.randn(1, tokens, DIM, requires_grad=True)
    run = timeit.Timer(lambda: layer(x).sum().backward(), timer=time.process_time)
    return 1e3 * min(run.repeat(3, number=1))


print(f"{'':28}{'layers':>8}{'steps':>8}" + "".join(f"{n:>12,}" for n in LENGTHS))
for name, make in LAYERS.items():
    depth = layers_between(make)
    steps = depth * (TOKENS if name == "LSTM" else 1)
    times = "".join(f"{milliseconds(make(0), n):>9.0f} ms" for n in LENGTHS)
    print(f"{name:28}{depth:8}{steps:8}{times}")
