# --8<-- [start:code]
"""Scores: what scaling does to gradients, what a temperature does, and which score can learn what.

Writes 04_scaling.png, weights and gradients by width and entropy by temperature, and 04_learning.png, four scores
learning to find a word.
"""

import sys
from math import log
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import Added, Dot, weights
from regard.nn import BahdanauAttention, LuongAttention

torch.manual_seed(0)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")

# q . k of independent numbers has variance d, so without a scale wide heads begin with all weight on one key.

widths, n, curves = [4, 16, 64, 256, 1024], 64, {}
for name, scale in (("q . k", 1.0), ("q . k / sqrt(d)", None)):
    sharp, flows = curves[name] = [], []
    for d in widths:
        q, k, v = torch.randn(1, 1, n, d), torch.randn(1, 1, n, d), torch.randn(1, 1, n, 16)
        bias = torch.zeros(1, 1, n, n, requires_grad=True)  # what is added to the scores shares their gradient
        A = weights(q, k, score=Dot(scale=scale), bias=Added(bias))
        (A @ v).sum().backward()
        sharp.append(A.max().mean().item())
        flows.append(bias.grad.norm(dim=-1).median().item())
        print(f"d = {d:4}  {name:15}  largest weight {sharp[-1]:.2f}  gradient of the scores {flows[-1]:.3f}")

# A temperature goes from the first maximum to the plain mean.

q, k = torch.randn(2, 1, 1, n, 64)
temperatures = torch.logspace(-2, 2, 41)
entropies = [weights(q, k, score=Dot(scale=64**-0.5 / t)).entropy().mean() for t in temperatures.tolist()]
print("entropy at temperatures 0.01, 1, 100: " + ", ".join(f"{entropies[at]:.2f}" for at in (0, 20, 40)))

# Twelve words stand in any order, and each is asked for in another language: the same vector in another basis.

n, dim = 12, 16
words = torch.randn(n, dim)
asked = (words @ torch.linalg.qr(torch.randn(dim, dim)).Q).expand(32, n, dim)  # b i d
layers = {
    "dot": LuongAttention(dim, score="dot"),
    "general": LuongAttention(dim, score="general"),
    "concat": LuongAttention(dim, score="concat"),
    "additive, 64 wide": BahdanauAttention(dim, dim, 64),
}
learning = {}
for name, layer in layers.items():
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02) if list(layer.parameters()) else None
    found = learning[name] = []
    for _ in range(40):
        order = torch.rand(32, n).argsort(-1)
        A = layer.weights(asked, layer.remember(words[order]))  # b 1 i j
        right = A[...].squeeze(1).gather(-1, order.argsort(-1)[..., None])  # b i 1: the weight on the word asked for
        found.append((right > 0.5).float().mean().item())
        if optimizer is not None:
            optimizer.zero_grad()
            (-right.clamp(min=1e-9).log().mean()).backward()
            optimizer.step()
    count = sum(x.numel() for x in layer.parameters())
    print(f"{name:18} {count:5} parameters  finds {sum(found[-10:]) / 10:.0%}")
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(1, 3, figsize=(11, 3))
for (name, (sharp, flows)), style in zip(curves.items(), ("o--", "o-"), strict=True):
    panels[0].plot(widths, sharp, style, label=name, color="#b73779")
    panels[1].plot(widths, flows, style, label=name, color="#3b0f70")
for panel, title in zip(panels, ("the largest weight", "norm of the scores' gradient"), strict=False):
    panel.set(xscale="log", xlabel="width d", title=title, ylim=(0, None))
    panel.legend()
panels[2].plot(temperatures, entropies, color="#b73779")
panels[2].axhline(log(64), color="#777777", linewidth=0.8)
panels[2].set(xscale="log", xlabel="temperature", title="entropy, nats; the line is log 64", ylim=(0, None))
figure.savefig(folder / "04_scaling.png")
figure, panel = plt.subplots(figsize=(5.5, 3))
for name, found in learning.items():
    panel.plot(found, label=name)
panel.set(xlabel="steps", title="queries with most weight on the right word", ylim=(0, 1.02))
panel.legend()
figure.savefig(folder / "04_learning.png")
# --8<-- [end:figures]
