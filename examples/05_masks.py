# --8<-- [start:code]
"""Masks: who may look at whom, drawn, combined, and held to their word.

Writes 05_masks.png: who may look at whom under eight masks.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import Causal, Diagonal, Documents, Global, Padding, Prefix, Window, attend, weights
from regard.views.figures.canvas import WHITE_TO_DARK

torch.manual_seed(0)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
n = 12
ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2])  # three texts packed into one row

masks = {
    "Padding(lengths)": Padding((9,)),
    "Causal()": Causal(),
    "~Diagonal()": ~Diagonal(),
    "Documents(ids)": Documents(ids),
    "Causal() & Documents(ids)": Causal() & Documents(ids),
    "Causal() & Window(4)": Causal() & Window(4),
    "Causal() | Prefix(4)": Causal() | Prefix(4),
    "Window(2) | Global(1)": Window(2) | Global(1),
}
nothing = torch.zeros(1, 1, n, 8)  # a zero query scores every key 0, so a weight above 0 is a visible key
visible = {name: weights(nothing, nothing, mask=mask)[0, 0] > 0 for name, mask in masks.items()}  # i j each
for name, seen in visible.items():
    print(f"{name:26} {seen.float().mean():4.0%} of the pairs")
print(Causal() & Documents(ids))

# Padding hides keys, whatever they hold: the answer is that of the text alone.

q, k, v = torch.randn(3, 1, 1, n, 8)
alone = attend(q, k[:, :, :9], v[:, :, :9])
k[:, :, 9:], v[:, :, 9:] = float("nan"), float("inf")
print(f"NaN and Inf in the padding: {(attend(q, k, v, mask=Padding((9,))) - alone).abs().max():.0e} apart")

# A causal model may not change its past when the future does, not by a bit.

q, k, v = torch.randn(3, 1, 1, n, 8)
before = attend(q, k, v, mask=Causal())
q[:, :, 7:], k[:, :, 7:], v[:, :, 7:] = torch.randn(3, 1, 1, n - 7, 8)
after = attend(q, k, v, mask=Causal())
print(f"another future changes {(before != after)[:, :, :7].sum()} numbers before it")

# Packed texts are as if each stood in a row of its own.

packed = attend(q, k, v, mask=Causal() & Documents(ids))
single = torch.cat([attend(*(x[:, :, ids == text] for x in (q, k, v)), mask=Causal()) for text in range(3)], 2)
print(f"packed and each alone: {(packed - single).abs().max():.0e} apart")

# A token that may look neither ahead nor at itself: the first sees nothing, and gets zeros rather than NaN.

empty = Causal() & ~Diagonal()
by_hand = torch.softmax((q @ k.mT).masked_fill(~torch.ones(n, n).tril(-1).bool(), float("-inf")), -1) @ v
print(f"the first row: {attend(q, k, v, mask=empty)[0, 0, 0, :3].tolist()}, by hand {by_hand[0, 0, 0, :3].tolist()}")

# With fewer queries than keys, as when a cache holds the past, the last query still stands on the last key.

print(Causal().draw(2, 6))
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(2, 4, figsize=(10, 5.4))
for panel, (name, seen) in zip(panels.flat, visible.items(), strict=True):
    panel.pcolormesh(seen, cmap=WHITE_TO_DARK, vmin=0, vmax=1.6, edgecolors="#cccccc", linewidth=0.5)
    panel.set(xticks=[], yticks=[], aspect="equal", ylim=(n, 0))
    panel.set_title(f"{name}\n{seen.float().mean():.0%} of the pairs")
figure.savefig(folder / "05_masks.png")
# --8<-- [end:figures]
