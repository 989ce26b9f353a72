# --8<-- [start:code]
"""Positions: attention by itself knows no order; five ways to tell it, and how each fares on longer sequences.

Writes 07_positions.png: how often the token two places back is copied, by place, in sequences four times as long as
those of the training.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from regard import Alibi, Causal
from regard.lens import capture
from regard.nn import Attention, EncoderBlock, FeedForward, Rotary, ShawBias, Sinusoidal, T5Bias, TokenEmbedding

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
torch.manual_seed(0)
DIM, HEADS, WORDS, SHORT, LONG, BACK = 32, 2, 10, 16, 64, 2
SCHEMES = {
    "none": dict,
    "causal mask": lambda: {"mask": Causal()},
    "sinusoids": dict,
    "rotary": lambda: {"rotary": Rotary(DIM // HEADS)},
    "alibi": lambda: {"bias": Alibi(HEADS)},
    "t5": lambda: {"bias": T5Bias(HEADS)},
    "shaw": lambda: {"bias": ShawBias(DIM // HEADS, reach=4)},
}


class Copier(nn.Module):
    """One block between an embedding and the logits of each place."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.words = TokenEmbedding(WORDS, DIM)
        self.places = Sinusoidal(DIM) if scheme == "sinusoids" else None
        self.block = EncoderBlock(Attention(DIM, HEADS, **SCHEMES[scheme]()), FeedForward(DIM, 64))
        self.out = nn.Linear(DIM, WORDS)
        self.mask = None if scheme == "none" else Causal()

    def forward(self, x: Tensor, *, first: int = 0, mask: Causal | None = None) -> Tensor:
        """States b n dim of vectors b n dim, the first of which stands at position `first`."""
        places = torch.arange(first, first + x.shape[1])
        x = x if self.places is None else x + self.places(places)
        return self.block(x, mask=mask, positions=places)

    def copies(self, ids: Tensor) -> Tensor:
        """Logits b n-2 words: at each place the token two before it, no one looking ahead."""
        return self.out(self(self.words(ids), mask=self.mask))[:, BACK:]


curves = {}
x, shuffle = torch.randn(1, SHORT, DIM), torch.randperm(SHORT)
new = torch.randint(WORDS, (256, LONG))
print(f"{'':12}{'shuffled':>10}{'moved':>10}{f'to {SHORT}':>10}{'beyond':>10}{'two back':>11}{'peak':>6}")
for scheme in SCHEMES:
    torch.manual_seed(0)
    model = Copier(scheme)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 200)
    for _ in range(200):
        ids = torch.randint(WORDS, (16, SHORT))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.copies(ids).flatten(0, 1), ids[:, :-BACK].flatten()).backward()
        optimizer.step()
        falling.step()
    with torch.no_grad(), capture(model) as tape:
        right = curves[scheme] = (model.copies(new).argmax(-1) == new[:, :-BACK]).float().mean(0)  # n - 2
        shuffled = (model(x[:, shuffle]) - model(x)[:, shuffle]).abs().max()
        moved = (model(x, first=1000) - model(x)).abs().max()
    near, far = right[: SHORT - BACK].mean(), right[SHORT - BACK :].mean()
    A = tape[0][...].mean((0, 1))  # b h n n -> n n
    back = [A[place, place - BACK] for place in (SHORT - 1, LONG - 1)]
    print(f"{scheme:12}{shuffled:10.1e}{moved:10.1e}{near:10.1%}{far:10.1%}", end="")
    print(f"{back[0]:6.0%}{back[1]:5.0%}{LONG - 1 - A[-1].argmax():6}")  # the peak: how far back the last looks most
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panel = plt.subplots(figsize=(8, 3.2))
for n, (scheme, right) in enumerate(curves.items()):
    line = {"color": plt.colormaps["plasma"](n / 8), "linestyle": "--" if n % 2 else "-", "linewidth": 1.4}
    panel.plot(range(BACK, LONG), right, label=scheme, **line)
panel.axvline(SHORT - 0.5, color="black", linewidth=0.8, linestyle=":")
panel.set(xlabel="place", ylabel="copied rightly", xlim=(0, LONG), ylim=(0, 1.03))
panel.set_title("right of the line: longer than any sequence of the training", loc="right")
panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
figure.savefig(folder / "07_positions.png")
# --8<-- [end:figures]
