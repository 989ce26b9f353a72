# --8<-- [start:code]
"""Alignment: the decoder looks back at every state of the source, and at the right one.

The task of chapter 1, with Bahdanau's attention and without. Writes 02_length.png, how many digits are right by the
length of the number, and 02_alignment.png, what each written digit looked at.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import views
from regard.decode import greedy
from regard.models import Seq2Seq, Seq2SeqConfig

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
START, END, DIGITS = 0, 1, range(2, 12)
LONGEST = 14


def numbers(count, length):
    """Random numbers, and the same backwards: b n and b n + 1, the end included."""
    digits = torch.randint(DIGITS.start, DIGITS.stop, (count, length))
    return {"source": digits, "target": torch.cat([digits.flip(1), torch.full((count, 1), END)], 1)}


def trained(attention, steps=250):
    """The same encoder and decoder, 32 wide, with attention between them or none."""
    torch.manual_seed(0)
    config = Seq2SeqConfig(
        source_vocabulary=12, target_vocabulary=12, start=START, dim=32, hidden=32, attention=attention, dropout=0.0
    )
    model = Seq2Seq(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(numbers(128, int(torch.randint(1, LONGEST + 1, ())))).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return model.eval()


def written(model, batch):
    """What the model writes for each number, and what each digit looked at: `attention["source"]`, 1 m n."""
    count, length = batch["source"].shape
    return greedy(model, batch, [[START]] * count, end=None, max_length=length)


lengths, curves = range(1, 13), {}
for attention in (None, "bahdanau"):
    model = trained(attention)
    name = "one vector" if attention is None else "with attention"
    digits = curves[name] = []
    for length in lengths:
        batch = numbers(200, length)
        found = torch.tensor([one.tokens for one in written(model, batch)])
        digits.append(100 * (found == batch["target"][:, :-1]).float().mean().item())
    parameters = sum(x.numel() for x in model.parameters())
    print(f"{name:14} {parameters:6,} parameters, digits right in numbers of 4, 8, 12:", end=" ")
    print(", ".join(f"{digits[n - 1]:.0f} %" for n in (4, 8, 12)))

# The weights of the last model: the first written digit looks at the last one read, and so back to the first.

batch = numbers(1, 10)
[one] = written(model, batch)
A = one.attention["source"][0]  # m n: a row for each digit written, a column for each digit read
read, wrote = ([str(token - DIGITS.start) for token in tokens] for tokens in (batch["source"][0].tolist(), one.tokens))
print(f"read {''.join(read)}, wrote {''.join(wrote)}, looking at places {one.alignment('source')}")

batch = numbers(200, 10)
found = written(model, batch)
right = torch.tensor([one.tokens for one in found]) == batch["target"][:, :-1]
away = (torch.tensor([one.alignment("source") for one in found]) - torch.arange(9, -1, -1)).abs()  # b m
print(f"of 2,000 digits in numbers of 10, {100 * right.float().mean():.0f} % are right;", end=" ")
print(f"{100 * (away == 0).float().mean():.0f} % looked most at their own place,", end=" ")
print(f"{100 * (away == 1).float().mean():.0f} % at the next")
# --8<-- [end:code]
# --8<-- [start:figures]

views.heatmap(A, wrote, read, axes=("written", "read")).savefig(folder / "02_alignment.png", dpi=100)
plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, axes = plt.subplots(figsize=(5.5, 3))
for (name, digits), colour in zip(curves.items(), ("#777777", "#b73779"), strict=True):
    axes.plot(lengths, digits, "o-", color=colour, label=name)
axes.set(title="digits right, %", xlabel="length of the number", ylim=(0, 103))
axes.legend()
figure.savefig(folder / "02_length.png")
# --8<-- [end:figures]
