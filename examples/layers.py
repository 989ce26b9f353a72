"""Every layer of regard.nn, and what it attends to: the pictures of docs/layers.md, one file a layer.

Layers that fetch are trained for a second to fetch the right thing; layers that know places are shown on tokens that
are all alike, so that only the place is seen. Writes layers_*.png.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from regard import Alibi, Causal, Window
from regard.nn import (
    CBAM,
    Attention,
    AttentionPool,
    BahdanauAttention,
    Coverage,
    LearnedSink,
    LocalAttention,
    LocationScore,
    LuongAttention,
    Rotary,
    SegmentMemory,
    SelectiveKernel,
    SelfAttention2d,
    ShawBias,
    Sinusoidal,
    SqueezeExcite,
    T5Bias,
)
from regard.views.figures.canvas import WHITE_TO_DARK

torch.manual_seed(0)
n, dim = 12, 16
pictures: dict[str, Tensor] = {}


def train(layer: nn.Module, loss: Callable[[], Tensor], steps: int = 120) -> None:
    """Adam on a loss that makes its own data."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


# Attention: on a text whose neighbours resemble each other, then on tokens that are all alike.

text = torch.randn(1, 2 * n, dim).cumsum(1) / 2
alike = torch.ones(1, 2 * n, dim)


def attention(**terms) -> Attention:
    """One head, untrained; queries and keys are the same projection, so that like attends to like."""
    layer = Attention(dim, 1, **terms)
    layer.key.load_state_dict(layer.query.state_dict())
    return layer


t5, shaw, sink = T5Bias(1, buckets=16, max_distance=20), ShawBias(dim, reach=4), LearnedSink(1)
for table in (t5.table, shaw.keys, sink.sink):
    nn.init.normal_(table, mean=1.0)

pictures["attention"] = attention().weights(text)[0, 0]
pictures["causal_window"] = attention(mask=Causal() & Window(8)).weights(text)[0, 0]
pictures["cross"] = attention().weights(text[:, ::2], text)[0, 0]
pictures["sink"] = attention(mask=Causal(), normalize=sink).weights(alike)[0, 0]
pictures["slots"] = attention(mask=Causal(), slots=4).weights(alike)[0, 0]
pictures["rotary"] = attention(rotary=Rotary(dim, base=100)).weights(alike)[0, 0]
pictures["alibi"] = Attention(dim, 8, mask=Causal(), bias=Alibi(8)).weights(alike)[0, 0]
pictures["t5"] = attention(bias=t5).weights(alike)[0, 0]
pictures["shaw"] = attention(bias=shaw).weights(alike)[0, 0]
segments = SegmentMemory(n)
segments.extend(text[:, :n])
pictures["segment_memory"] = attention(mask=Causal()).weights(text[:, n:], segments.extend(text[:, n:]))[0, 0]

# Recurrent decoders: step t asks for the source word at order[t]: groups of three, each read backwards.

order = torch.arange(n).view(-1, 3).flip(1).flatten()
places = 2 * Sinusoidal(dim)(torch.arange(n))
turned = torch.linalg.qr(torch.randn(dim, dim)).Q  # the decoder writes in another basis


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """Queries, and the source states they ask for."""
    states = torch.randn(count, n, dim) + places
    return states[:, order] @ turned, states


def fetching(decoder: nn.Module) -> Callable[[], Tensor]:
    """How far the context is from the state asked for."""

    def loss() -> Tensor:
        query, states = sentences(16)
        return (decoder(query, decoder.remember(states)) - states[:, order]).square().mean()

    return loss


decoders = {
    "bahdanau": BahdanauAttention(dim, dim, 32),
    "luong_general": LuongAttention(dim, score="general"),
    "luong_concat": LuongAttention(dim, score="concat"),
    "luong_location": LuongAttention(dim, score=LocationScore(dim, places=n)),
    "local_monotonic": LocalAttention(dim, radius=2, center="monotonic"),
    "local_predictive": LocalAttention(dim, radius=4, center="predictive"),
}
query, states = sentences(1)
for name, decoder in decoders.items():
    train(decoder, fetching(decoder))
    pictures[name] = decoder.weights(query, decoder.remember(states)).dense()[0, 0]

dot = LuongAttention(dim, score="dot")
pictures["luong_dot"] = dot.weights(states[:, order], dot.remember(states))[0, 0]

# The same query at every step: a state that has been attended loses, and the decoder reads on.
layer = BahdanauAttention(dim, dim, 32, coverage=Coverage(32))
with torch.no_grad():
    layer.score.vector.mul_(20)
    layer.coverage.weight.copy_(-4 * layer.score.vector.sign())
    memory, steps = layer.remember(states), []
    for _ in range(n):
        A = layer.weights(query[:, 0], memory)
        steps.append(A[0, 0, 0])
        memory = memory.cover(A)
pictures["coverage"] = torch.stack(steps)

# Pooling: one token of each sequence is marked, and the pool must find it.


def marked(count: int) -> tuple[Tensor, Tensor]:
    """Sequences, and the marked token of each."""
    tokens, at = torch.randn(count, n, dim), torch.randint(n, (count,))
    tokens[torch.arange(count), at, 0] += 4
    return tokens, tokens[torch.arange(count), at]


def finding() -> Tensor:
    """How far the pooled vector is from the marked token."""
    tokens, target = marked(32)
    return (pool(tokens) - target).square().mean()


pool = AttentionPool(dim, hidden=8)
train(pool, finding)
pictures["pool"] = pool.weights(marked(n)[0]).dense()[:, 0, 0]

# Vision: a disc and a square of another colour, on noise.

size, channels = 24, 8
y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
disc, square = (y - 7) ** 2 + (x - 8) ** 2 < 22, (y > 13) & (y < 21) & (x > 12) & (x < 20)
colours = 2 * torch.linalg.qr(torch.randn(channels, channels)).Q[:2, :, None, None]


def images(count: int) -> Tensor:
    """The same two shapes, on noise of their own."""
    return 0.3 * torch.randn(count, channels, size, size) + colours[0] * disc + colours[1] * square


def keeping_the_disc() -> Tensor:
    """How far the gated map is from the disc alone."""
    maps = images(8)
    return (cbam(maps) - maps * disc).square().mean()


def keeping_loud_channels() -> Tensor:
    """How far the gated map is from its loud channels alone."""
    loud = torch.rand(64, channels, 1, 1) > torch.rand(64, 1, 1, 1)
    maps = torch.randn(64, channels, 4, 4) + 3 * loud
    return (excite(maps) - maps * loud).square().mean()


look = SelfAttention2d(channels, width=channels)
for side in (look.query, look.key):
    nn.init.dirac_(side.weight)  # like attends to like
scene, middle = images(1), 7 * size + 8  # what the middle of the disc attends to
pictures["self2d"] = look.weights(scene)[0, 0, middle].view(size, size)
coarse = nn.functional.avg_pool2d(scene, 2)
pictures["self2d_scales"] = look.weights(scene, coarse)[0, 0, middle].view(size // 2, size // 2)

cbam = CBAM(channels, reduction=2, kernel=3)
train(cbam, keeping_the_disc)
pictures["cbam"] = cbam.place_gates(scene * cbam.channel_gates(scene)[..., None, None])[0]

excite = SqueezeExcite(channels, reduction=1)
train(excite, keeping_loud_channels, steps=300)
pictures["squeeze_excite"] = excite.gates(3 * torch.ones(channels, channels).tril()[:, :, None, None])
pictures["selective_kernel"] = SelectiveKernel(channels, kernels=(3, 5, 7)).weights(images(8))[0, :, 0]

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
for name, A in pictures.items():
    cell = max(6, 240 // max(A.shape))  # pixels
    pixels = A.detach().sqrt().repeat_interleave(cell, 0).repeat_interleave(cell, 1)
    plt.imsave(folder / f"layers_{name}.png", pixels, cmap=WHITE_TO_DARK, vmin=0)
print(f"wrote {len(pictures)} pictures")
