"""Masks: who may look at whom, drawn, combined, and held to their word.

Writes 05_masks.png: the weights of a query that likes all keys alike, under eight masks.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import Causal, Diagonal, Documents, Global, Padding, Prefix, Window, attend, weights

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
figure, panels = plt.subplots(2, 4, figsize=(10, 5.4), constrained_layout=True)
nothing = torch.zeros(1, 1, n, 8)  # a zero query scores every key 0: its weights are 1 / the keys it sees
for panel, (name, mask) in zip(panels.flat, masks.items(), strict=True):
    A = weights(nothing, nothing, mask=mask)[0, 0]
    panel.imshow(A.sqrt(), cmap="magma", vmin=0, vmax=1)
    panel.set(xticks=[], yticks=[])
    panel.set_title(f"{name}\n{(A > 0).float().mean():.0%} of the pairs", fontsize=9)
figure.savefig(folder / "05_masks.png", dpi=100)
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
