"""Mistakes of five tutorials on attention, written anew, run, checked and repaired.

Writes five_tutorials.png: which token reaches which before and after each repair.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import regard
from regard.views.figures.canvas import WHITE_TO_DARK

torch.manual_seed(0)
plt.style.use(Path(__file__).with_name("book.mplstyle"))
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
panels = {}  # title: which token reaches which


def names(report):
    """The names of what was found."""
    return ", ".join(finding.name for finding in report.findings) or "no finding"


def reach(function, n=12):
    """Whether output i depends on token j, n n."""
    slopes = torch.autograd.functional.jacobian(function, torch.randn(1, n, 32))
    return slopes.abs().sum((0, 2, 3, 5)) > 0


# --8<-- [start:heads]
class MultiHead(nn.Module):
    """Self-attention as a tutorial writes it."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, dim = x.shape
        q, k, v = (w(x).view(b, n, self.heads, self.width) for w in (self.query, self.key, self.value))
        A = (q @ k.transpose(-2, -1) / self.width**0.5).softmax(-1)
        return self.out((A @ v).transpose(1, 2).contiguous().view(b, n, dim))


with regard.capture(wrong := MultiHead()) as tape:
    wrong(torch.randn(2, 10, 32))
print(tape)
print(names(regard.check(wrong)))
# --8<-- [end:heads]


# --8<-- [start:heads_right]
class Repaired(MultiHead):
    """Heads are moved before the tokens, and back."""

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.query, self.key, self.value))
        A = (q @ k.transpose(-2, -1) / self.width**0.5).softmax(-1)
        return self.out((A @ v).transpose(1, 2).flatten(2))


with regard.capture(right := Repaired()) as tape:
    right(torch.randn(2, 10, 32))
print(tape)
print(names(regard.check(right)))
# --8<-- [end:heads_right]
panels |= {"heads attend\nto heads": reach(wrong), "tokens attend\nto tokens": reach(right)}


# --8<-- [start:cut]
def multi_head(Q, K, V, num_heads, mask=None):
    """Each head gets a piece of the text; the mask is not used."""
    size = Q.shape[1] // num_heads
    heads = []
    for h in range(num_heads):
        q, k, v = (x[:, h * size : (h + 1) * size] for x in (Q, K, V))
        heads.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)
    return torch.cat(heads, 1)


text = torch.randn(1, 10, 32)
print("in:", *text.shape, "out:", *multi_head(text, text, text, 4).shape)
print(names(regard.check(multi_head, heads=4)))
# --8<-- [end:cut]


# --8<-- [start:cut_right]
def multi_head_repaired(Q, K, V, num_heads, mask=None):
    """Each head gets a slice of the features; True in the mask = may attend."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (Q, K, V))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


print("in:", *text.shape, "out:", *multi_head_repaired(text, text, text, 4).shape)
print(names(regard.check(multi_head_repaired, heads=4)))
# --8<-- [end:cut_right]
panels["heads cut\nfrom tokens"] = reach(lambda x: multi_head(x, x, x, 4))
panels["heads cut\nfrom features"] = reach(lambda x: multi_head_repaired(x, x, x, 4))


# --8<-- [start:empty]
def attention(q, k, v, mask=None):
    """Hidden scores become -1e9."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v


q, k, v = torch.randn(3, 1, 4, 6, 8)
nothing = torch.zeros(6, 6, dtype=torch.bool)
print("the mean of all values:", torch.allclose(attention(q, k, v, nothing), v.mean(-2, keepdim=True)))
print(names(regard.check(attention)))
# --8<-- [end:empty]


# --8<-- [start:empty_right]
def attention_repaired(q, k, v, mask=None):
    """Hidden scores become -inf, and rows with nothing else zeros."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


print("zeros:", bool((attention_repaired(q, k, v, nothing) == 0).all()))
print(names(regard.check(attention_repaired)))
# --8<-- [end:empty_right]
past = torch.ones(12, 12).tril(-1).bool()
panels["-1e9: the first row\nsees the future"] = reach(lambda x: attention(x, x, x, past))
panels["-inf, then 0"] = reach(lambda x: attention_repaired(x, x, x, past))


# --8<-- [start:scale]
def by_width(q, k, v):
    """Scores are divided by the width."""
    return (q @ k.mT / q.shape[-1]).softmax(-1) @ v  # repaired: q.shape[-1] ** 0.5


q, k, v = torch.randn(3, 1, 4, 64, 64)
for name, scores in (("d", q @ k.mT / 64), ("sqrt(d)", q @ k.mT / 64**0.5)):
    print(f"divided by {name}: largest weight {scores.softmax(-1).amax(-1).mean():.2f} of 64 keys")
print(names(regard.check(by_width)))
# --8<-- [end:scale]

# --8<-- [start:twice]
e = torch.tensor([0.0, 0.5, 1.0, 1.5])  # scores
once, twice = e.exp() / e.exp().sum(), e.exp() / e.exp().exp().sum()
print("exp(e) / sum of exp(e)     :", [round(x, 3) for x in once.tolist()], f"sum {once.sum():.3f}")
print("exp(e) / sum of e^(exp(e)) :", [round(x, 3) for x in twice.tolist()], f"sum {twice.sum():.3f}")
# --8<-- [end:twice]

figure, axes = plt.subplots(1, len(panels), figsize=(11, 2.3))
for axis, (title, pairs) in zip(axes, panels.items(), strict=True):
    axis.imshow(pairs, cmap=WHITE_TO_DARK, vmin=0, vmax=1.6)
    axis.set_title(title, fontsize=8)
    axis.set(xticks=[], yticks=[])
figure.savefig(folder / "five_tutorials.png")
