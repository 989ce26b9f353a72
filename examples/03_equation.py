# --8<-- [start:code]
"""Queries, keys, values: a dictionary that answers any question, and the one equation slot by slot.

Writes 03_dictionary.png, what a dictionary of three colours answers, and 03_slots.png, the equation between its slots.
"""

import sys
from math import pi
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from regard import Alibi, Causal, Dot, Entmax, Hard, Softmax, attend, weights
from regard.views.figures.canvas import WHITE_TO_DARK

torch.manual_seed(0)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")

# A dictionary of three entries: the key is a direction, the value a colour. Queries go once around the circle.


def direction(turn):
    """Turns to points on a circle: n -> 1 1 n 2."""
    return torch.stack([torch.cos(2 * pi * turn), torch.sin(2 * pi * turn)], -1)[None, None]


k = direction(torch.tensor([1, 3, 5]) / 6)  # b h j d = 1 1 3 2
v = torch.tensor([[0.75, 0.15, 0.35], [0.95, 0.75, 0.30], [0.20, 0.25, 0.60]])[None, None]  # b h j e = 1 1 3 3
q = direction(torch.arange(240) / 240)  # b h i d = 1 1 240 2

answers = {
    "Dot(scale=1)": {"score": Dot(scale=1.0)},
    "Dot(scale=4)": {"score": Dot(scale=4.0)},
    "Dot(scale=16)": {"score": Dot(scale=16.0)},
    "Hard()": {"normalize": Hard()},
}
colours = {}
for name, terms in answers.items():
    colours[name] = attend(q, k, v, **terms)  # b h i e = 1 1 240 3
    between = weights(q[:, :, [0, 40, 60]], k, **terms)[0, 0]
    print(f"{name:13}", *(f"[{', '.join(f'{x:.2f}' for x in row)}]" for row in between.tolist()))

# The equation, one slot after the other, on tokens that drift slowly, as the words of a text do.

b, h, i, j, d, e = 1, 1, 20, 20, 16, 8
tokens = F.layer_norm(torch.randn(b, h, j, d).cumsum(2), (d,))
q, k, v = tokens, tokens, torch.randn(b, h, j, e)
place = torch.arange(j)

s = torch.einsum("b h i d, b h j d -> b h i j", q, k) / d**0.5  # score
biased = s - 0.2 * (place[:, None] - place).abs()  # + bias
masked = biased.masked_fill(place > place[:, None], float("-inf"))  # mask
A = torch.softmax(masked, -1)  # normalize
out = torch.einsum("b h i j, b h j e -> b h i e", A, v)

terms = {"score": Dot(), "bias": Alibi(slopes=torch.tensor([0.2])), "mask": Causal(), "normalize": Softmax()}
print(f"by hand and by attend: {(out - attend(q, k, v, **terms)).abs().max():.1e} apart")
print(f"by weights(...) @ v:   {(out - weights(q, k, **terms) @ v).abs().max():.1e} apart")
sparse = weights(q, k, **terms | {"normalize": Entmax(1.5)}).dense()
for name, x in (("Softmax()", A), ("Entmax(1.5)", sparse)):
    print(f"weights above zero by {name}: {(x > 0).float().mean():.0%}")
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(len(colours), 1, figsize=(7, 2.4), sharex=True)
for panel, (name, out) in zip(panels, colours.items(), strict=True):
    panel.imshow(out[0, 0][None], aspect="auto", extent=(0, 1, 0, 1))
    panel.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    panel.set(yticks=[], xticks=[1 / 6, 3 / 6, 5 / 6], xticklabels=["key 0", "key 1", "key 2"])
figure.savefig(folder / "03_dictionary.png")

figure, panels = plt.subplots(1, 5, figsize=(11, 2.6))
for panel, name, x in zip(panels, ("score(q, k)", "+ bias", "mask"), (s, biased, masked), strict=False):
    panel.imshow(x[0, 0], cmap="Blues", vmin=s.min(), vmax=s.max())  # scores; the weights have colours of their own
    panel.set_title(name)
for panel, name, x in zip(panels[3:], ("normalize: A", "Entmax(1.5) instead"), (A, sparse), strict=True):
    panel.imshow(x[0, 0].sqrt(), cmap=WHITE_TO_DARK, vmin=0, vmax=1)
    panel.set_title(name)
for panel in panels:
    panel.set(xticks=[], yticks=[], xlabel="keys j")
panels[0].set_ylabel("queries i")
figure.savefig(folder / "03_slots.png")
# --8<-- [end:figures]
