# --8<-- [start:code]
"""Why a fixed context vector fails: a sequence squeezed into one vector, and how much of it comes out again.

Two recurrent encoder-decoders without attention learn to write a number backwards. Writes 01_length.png: how many of
the digits are right, by the length of the number, and 01_places.png: which of them.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard.decode import greedy
from regard.models import Seq2Seq, Seq2SeqConfig

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
START, END, DIGITS = 0, 1, range(2, 12)
LONGEST = 14


def numbers(count, length):
    """Random numbers, and the same backwards: b n and b n + 1, the end included."""
    digits = torch.randint(DIGITS.start, DIGITS.stop, (count, length))
    return {"source": digits, "target": torch.cat([digits.flip(1), torch.full((count, 1), END)], 1)}


def trained(hidden, steps=200):
    """An encoder and a decoder, and between them one vector `hidden` wide."""
    torch.manual_seed(0)
    config = Seq2SeqConfig(
        source_vocabulary=12, target_vocabulary=12, start=START, dim=32, hidden=hidden, attention=None, dropout=0.0
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


def right(model, length, count=200):
    """Which digits of new numbers are written right: b n."""
    batch = numbers(count, length)
    found = greedy(model, batch, [[START]] * count, end=None, max_length=length)
    return torch.tensor([one.tokens for one in found]) == batch["target"][:, :-1]


lengths, found = range(1, 13), {}
for hidden in (32, 96):
    model = trained(hidden)
    found[hidden] = [right(model, length) for length in lengths]
    digits = [100 * x.float().mean().item() for x in found[hidden]]
    exact = [100 * x.all(1).float().mean().item() for x in found[hidden]]
    for length in (2, 4, 6, 8, 10, 12):
        print(
            f"{hidden} wide, {length:2} digits: {digits[length - 1]:3.0f} % of the digits right, "
            f"{exact[length - 1]:3.0f} % of the numbers"
        )
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, (by_length, whole) = plt.subplots(1, 2, figsize=(9, 3), sharex=True)
places, panel = plt.subplots(figsize=(5.5, 3))
for (hidden, shares), colour in zip(found.items(), ("#b73779", "#3b0f70"), strict=True):
    digits = [100 * x.float().mean() for x in shares]
    exact = [100 * x.all(1).float().mean() for x in shares]
    by_length.plot(lengths, digits, "o-", color=colour, label=f"{hidden} wide")
    whole.plot(lengths, exact, "o-", color=colour, label=f"{hidden} wide")
    panel.plot(range(12, 0, -1), 100 * shares[-1].float().mean(0), "o-", color=colour, label=f"{hidden} wide")
by_length.set(title="digits right, %", xlabel="length of the number", ylim=(0, 103))
whole.set(title="whole numbers right, %", xlabel="length of the number", ylim=(0, 103))
for axes in (by_length, whole, panel):
    axes.axhline(0 if axes is whole else 10, color="#777777", linewidth=0.8)  # by chance
    axes.legend()
figure.savefig(folder / "01_length.png")
panel.set(title="digits right, %, in numbers of 12", xlabel="place in the number; 12 was read last", ylim=(0, 103))
places.savefig(folder / "01_places.png")
# --8<-- [end:figures]
