# --8<-- [start:code]
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
from regard.views.figures.canvas import WHITE_TO_DARK

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


maps = {}
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
    mixed = torch.special.entr(A[0, :, 4:].mean(0)).sum(-1).mean()
    print(f"heads {heads}: error {loss:.3f}, entropy of a head {entropy:.2f}, of the mean over heads {mixed:.2f} nats")
    maps |= {f"{heads} head{'s' * (heads > 1)}: {head}": A[0, head, 4:].detach() for head in range(heads)}

# Heads are slices of the features. A view alone makes them slices of the tokens, and no shape complains.

heads, dim = 4, 16
projections = torch.randn(3, dim, dim) / dim**0.5
apart = {  # 1 n (h d) -> 1 h n d; the view has the same shape, and other numbers
    "transpose": lambda x: x.unflatten(-1, (heads, -1)).transpose(1, 2),
    "view": lambda x: x.reshape(1, heads, n, -1),
}
together = {"transpose": lambda x: x.transpose(1, 2).flatten(2), "view": lambda x: x.reshape(1, n, -1)}
ways = ("transpose", "transpose"), ("view", "view"), ("view", "transpose"), ("transpose", "view")
allowed = torch.ones(n, n).tril().bool()
reached = {}
for split, merge in ways:

    def layer(x, split=apart[split], merge=together[merge]):
        """Causal attention with this way in and this way out: 1 n dim -> 1 n dim."""
        return merge(attend(*(split(x @ w) for w in projections), mask=Causal()))

    slopes = torch.autograd.functional.jacobian(layer, torch.randn(1, n, dim))
    reach = slopes.abs().sum((0, 2, 3, 5)) > 0  # i j: does token j reach token i?
    leaks, gaps = (reach & ~allowed).sum(), (allowed & ~reach).sum()
    print(f"{f'{split}, {merge}':20} {leaks:3} pairs leak the future, {gaps:3} never meet")
    reached[f"{split}, {merge}"] = reach * 1.0 + (reach & ~allowed) * 0.6

# Grouped queries: heads 0 and 1 share key head 0, heads 2 and 3 key head 1. Tiling would pair 0 with 2.

q, k, v = torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
shared = attend(q, k, v)
for name, repeated in (("beside", lambda x: x.repeat_interleave(2, 1)), ("tiled", lambda x: x.repeat(1, 2, 1, 1))):
    print(f"grouped, and repeated {name}: {(shared - attend(q, repeated(k), repeated(v))).abs().max():.1f} apart")
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(1, 7, figsize=(11, 2.2))
mistakes, beside = plt.subplots(1, 4, figsize=(10, 2.8))
for panel, (name, A) in zip(panels, maps.items(), strict=True):
    panel.imshow(A.sqrt(), cmap=WHITE_TO_DARK, vmin=0, vmax=1)
    panel.set(title=name, xticks=[], yticks=[])
for panel, (name, reach) in zip(beside, reached.items(), strict=True):
    panel.imshow(reach, cmap=WHITE_TO_DARK, vmin=0, vmax=2)
    panel.set(title=name, xticks=[], yticks=[])
figure.savefig(folder / "06_heads.png")
mistakes.savefig(folder / "06_mistakes.png")
# --8<-- [end:figures]
