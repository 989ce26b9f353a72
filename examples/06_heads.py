"""Many heads: why one is not enough, and the mistakes made in splitting them.

Writes 06_heads.png, the weights of layers with one, two and four heads that must look at two places at once, and
06_mistakes.png, which token reaches which when heads are split well or badly.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import Causal, attend
from regard.nn import Attention, Sinusoidal

torch.manual_seed(0)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
n, dim, content = 16, 32, 6
places = Sinusoidal(dim - content)(torch.arange(n))  # n 26

# Each token must say what stands one place and four places before it. One head has one average to say it with.


def texts(count):
    """Tokens, and what they must say: b n 32 and b n 12."""
    told = torch.randn(count, n, content)
    x = torch.cat([told, places.expand(count, -1, -1)], -1)
    return x, torch.cat([told.roll(1, 1), told.roll(4, 1)], -1)


figure, panels = plt.subplots(1, 7, figsize=(11, 2.2), constrained_layout=True)
shown = iter(panels)
for heads in (1, 2, 4):
    layer, read = Attention(dim, heads=heads), torch.nn.Linear(dim, 2 * content)
    optimizer = torch.optim.Adam([*layer.parameters(), *read.parameters()], lr=5e-3)
    for _ in range(400):
        x, told = texts(32)
        loss = (read(layer(x)) - told)[:, 4:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    A = layer.weights(texts(1)[0])  # b h i j
    entropy = A.entropy()[0, :, 4:].mean()
    mean = A[0, :, 4:].mean(0)
    mixed = -(mean * mean.clamp(min=1e-9).log()).sum(-1).mean()
    print(f"heads {heads}: error {loss:.3f}, entropy of a head {entropy:.2f}, of the mean over heads {mixed:.2f} nats")
    for head in range(heads):
        panel = next(shown)
        panel.imshow(A[0, head, 4:].detach().sqrt(), cmap="magma", vmin=0, vmax=1)
        panel.set_title(f"{heads} head{'s' * (heads > 1)}: {head}", fontsize=9)
        panel.set(xticks=[], yticks=[])
figure.savefig(folder / "06_heads.png", dpi=100)

# Heads are slices of the features. A view alone makes them slices of the tokens, and no shape complains.

b, heads, dim = 1, 4, 16
projections = torch.randn(3, dim, dim) / dim**0.5


def by_features(x):
    """b n (h d) -> b h n d."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def by_view(x):
    """The same shape, other numbers."""
    return x.reshape(b, heads, n, dim // heads)


def layer(x, split, merge):
    """Causal attention with these ways in and out: b n dim -> b n dim."""
    return merge(attend(*(split(x @ w) for w in projections), mask=Causal()))


ways = {
    "split and merged right": (by_features, lambda x: x.transpose(1, 2).flatten(2)),
    "view, view": (by_view, lambda x: x.reshape(b, n, dim)),
    "view, transpose": (by_view, lambda x: x.transpose(1, 2).flatten(2)),
    "transpose, view": (by_features, lambda x: x.reshape(b, n, dim)),
}
figure, panels = plt.subplots(1, 4, figsize=(10, 2.8), constrained_layout=True)
allowed = torch.ones(n, n).tril().bool()
for panel, (name, way) in zip(panels, ways.items(), strict=True):
    slopes = torch.autograd.functional.jacobian(lambda x, way=way: layer(x, *way), torch.randn(b, n, dim))
    reach = slopes.abs().sum((0, 2, 3, 5)) > 0  # i j: does token j reach token i?
    print(f"{name:23} {(reach & ~allowed).sum():3} pairs leak the future, {(allowed & ~reach).sum():3} never meet")
    panel.imshow(reach * 1.0 + (reach & ~allowed) * 0.6, cmap="magma_r", vmin=0, vmax=2)
    panel.set(title=name, xticks=[], yticks=[])
figure.savefig(folder / "06_mistakes.png", dpi=100)

# Grouped queries: heads 0 and 1 share key head 0, heads 2 and 3 key head 1. Tiling would pair 0 with 2.

q, k, v = torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
shared = attend(q, k, v)
for name, repeated in (("beside", lambda x: x.repeat_interleave(2, 1)), ("tiled", lambda x: x.repeat(1, 2, 1, 1))):
    print(f"grouped, and repeated {name}: {(shared - attend(q, repeated(k), repeated(v))).abs().max():.1f} apart")
