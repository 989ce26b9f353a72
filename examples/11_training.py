# --8<-- [start:code]
"""Training and decoding: what a decoder is fed, which loss it has, and how its best sequence is found.

Writes 11_training.png: right by place, fed the truth and fed itself; how sure models are; what finds most sequences.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard.decode import Ensemble, average, beam, greedy, score
from regard.models import Transformer, TransformerConfig
from regard.nn.losses import shift_right
from regard.train import Cosine, Recipe, Shuffled, Silence, fit

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
START, END, RATE = 1, 2, Cosine(5e-3, steps=220, warmup=20)


def letters(count, n):
    """n letters, 3 to 28, and the same in order: b n and b n + 1, the end included."""
    source = torch.randint(3, 29, (count, n))
    return {"source": source, "target": torch.cat([source.sort(1).values, torch.full((count, 1), END)], 1)}


def trained(seed, smoothing=0.0):
    """One layer that reads and one that writes, always fed the truth, dropout 0.1."""
    torch.manual_seed(seed)
    sizes = {"dim": 48, "heads": 4, "hidden": 96, "encoder_layers": 1, "decoder_layers": 1, "smoothing": smoothing}
    model = Transformer(TransformerConfig(source_vocabulary=29, target_vocabulary=29, start=START, **sizes))
    batches = Shuffled([letters(32, int(torch.randint(3, 9, ()))) for _ in range(100)])
    with tempfile.TemporaryDirectory() as run:
        fit(model, batches, Recipe(steps=220, rate=RATE, seed=seed), folder=run, show=Silence())
    return model.eval()


def exact(found):
    """How many sequences are right, in per cent."""
    return 100 * sum(list(one.tokens) == right for one, right in zip(found, target.tolist(), strict=True)) / len(found)


members, smoothed = [trained(seed) for seed in range(3)], trained(0, smoothing=0.1)
torch.manual_seed(99)
data, prefix = letters(400, 6), [[START]] * 400
target, asked = data["target"], {"source": data, "prefix": prefix, "end": END, "max_length": 11}
confident, places = {}, {}

# Fed the truth, as in training, and fed what it wrote itself; sure with smoothing and without.
alone = greedy(members[0], **asked)
said = {"fed itself": torch.tensor([(*one.tokens, *[0] * 7)[:7] for one in alone])}  # b 7
for name, model in {"smoothed": smoothed, "plain": members[0]}.items():
    logits = model(data["source"], shift_right(target, start=START)).detach()  # b 7 words
    sure, said["fed the truth"] = logits.softmax(-1).max(-1)  # b 7 twice
    known = torch.tensor([one.log_probability for [one] in score(model, data, prefix, target[:, None].tolist())])  # b
    print(f"{name}: loss {-known.mean() / 7:.3f}, sure {sure.mean():.1%}", end=", ")
    print(f"right {(said['fed the truth'] == target).float().mean():.1%}")
    confident[name] = sure.flatten()
for name, tokens in said.items():
    by_place = places[name] = (tokens == target).float().mean(0)
    print(f"{name}: right in {by_place[1]:.1%} of the second places, in {by_place[5]:.1%} of the sixth")

# What a wider beam finds, whom to blame when the best it finds is wrong, and what three models know together.
bars = {f"model {n}": exact(greedy(model, **asked)) for n, model in enumerate(members)}
for width in (2, 8):
    found = [best for [best, *_] in beam(members[0], width=width, **asked)]
    bars[f"beam of {width}"] = exact(found)
    p, old = (torch.tensor([one.log_probability for one in some]) for some in (found, alone))  # b twice
    more, less = (100 * (gap > 1e-4).float().mean() for gap in (known - p, p - known))
    print(f"beam of {width}: log p {(p - old).mean():+.3f}", end="; ")
    print(f"the truth is likelier in {more:.1f} %, less likely in {less:.1f} %")
bars["ensemble of 3"] = exact(greedy(Ensemble(members), **asked))
members[0].load_state_dict(average(model.state_dict() for model in members))
bars["mean of weights"] = exact(greedy(members[0], **asked))
print(", ".join(f"{name} {value:.1f} %" for name, value in bars.items()))
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
for name, by_place in places.items():
    left.plot(range(1, 8), by_place, marker="o", label=name)
for name, sure in confident.items():
    middle.hist(sure, bins=20, range=(0, 1), alpha=0.6, label=name)
left.set(xlabel="place in the target", ylabel="right", title="forcing")
middle.set(xlabel="probability of the likeliest token", ylabel="tokens", title="smoothing", yscale="log")
right.set(xlabel="sequences exactly right, %", title="decoding")
right.barh(list(bars)[::-1], list(bars.values())[::-1], color="#5c4a8a")
left.legend()
middle.legend()
figure.savefig(folder / "11_training.png")
# --8<-- [end:figures]
