"""One equation, four slots: change a term, and see what each query looks at.

Writes operator.png: ten mechanisms over the same queries and keys, and the map of a sequence of 20,000
tokens whose matrix would take 1.6 GB.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import PowerNorm

from regard import (
    Additive,
    Alibi,
    Causal,
    Documents,
    Entmax,
    Gaussian,
    Global,
    Near,
    SinkSoftmax,
    Softmax,
    Tapered,
    Window,
    explain,
    weights,
)
from regard.views.figures.canvas import WHITE_TO_DARK

MOST = 0.25  # weight at the end of the scale
torch.manual_seed(0)
n, d = 48, 16
q = k = torch.randn(1, 1, n, d).cumsum(2) / 4  # neighbours resemble each other, as words of a text do
center = torch.arange(n) * 0.6 + 8

mechanisms = {
    "Dot() + Softmax()": {},
    "mask=Causal()": {"mask": Causal()},
    "mask=Causal() & Window(8)": {"mask": Causal() & Window(8)},
    "mask=Window(4) | Global(3)": {"mask": Window(4) | Global(3)},
    "mask=Documents(ids)": {"mask": Documents(torch.arange(n) // 17)},
    "bias=Alibi(slopes=s)": {"mask": Causal(), "bias": Alibi(slopes=torch.tensor([0.4]))},
    "score=Additive(u)": {"score": Additive(torch.randn(d))},
    "normalize=Entmax(1.5)": {"normalize": Entmax(1.5)},
    "Tapered(Softmax(), Gaussian(c, 3))": {
        "mask": Near(center, 8),
        "normalize": Tapered(Softmax(), Gaussian(center, 3.0)),
    },
    "normalize=SinkSoftmax(2)": {"mask": Causal(), "normalize": SinkSoftmax(2.0)},
}

figure, axes = plt.subplots(2, 6, figsize=(17.6, 6.2), constrained_layout=True)
panels = list(axes.flat)
for panel, (name, terms) in zip(panels, mechanisms.items(), strict=False):
    A = weights(q, k, **terms)
    shown = panel.imshow(A.dense()[0, 0], cmap=WHITE_TO_DARK, norm=PowerNorm(0.5, 0, MOST))
    panel.set_title(f"{name}\nentropy {A.entropy().mean():.2f} nats", fontsize=8.5)
bar = figure.colorbar(shown, ax=axes, location="right", shrink=0.5, aspect=30, pad=0.01, extend="max")
bar.set_label(f"weight, square-root scale, {MOST} or more black")

print(Causal() & Window(4))

long = torch.randn(1, 1, 20_000, d).cumsum(2) / 40
A = weights(long, long, mask=Causal())
print(A)
print(explain(long, long, long, mask=Causal()))
summary = A.summary()
print(f"most attended key of {A.shape[-1]:,}: {int(summary.received.argmax())}")
print(f"mean distance looked back: {float(summary.distance.mean()):,.0f} tokens")

cells = summary.map[0, 0]
panels[10].imshow(cells, cmap=WHITE_TO_DARK, norm=PowerNorm(0.5, 0, float(cells.quantile(0.995))))
panels[10].set_title("20,000 tokens\nA.summary().map, a scale of its own", fontsize=8.5)
panels[11].plot(summary.received[0, 0], linewidth=0.6, color="#b5367a")
panels[11].set_title("20,000 tokens\nA.summary().received", fontsize=8.5)
panels[11].set(xlabel="key", ylabel="attention received")
for panel in panels[:11]:
    panel.set(xticks=[], yticks=[], xlabel="key", ylabel="query")

figure.savefig(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images") / "operator.png", dpi=110, bbox_inches="tight")
