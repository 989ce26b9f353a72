"""Training and decoding: what a decoder is fed, what it is punished for, and how its best sequence is found.

Writes 11_training.png: letters put in order, right by place when fed the truth and when fed itself; how sure a model is
with label smoothing and without; how many sequences are right by one model, by wider beams, and by three models.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data import Generated, Pair, Sort
from regard.decode import Ensemble, Hypothesis, average, beam, greedy, score
from regard.models import Transformer, TransformerConfig
from regard.nn import cross_entropy
from regard.nn.losses import shifted
from regard.train import Cosine, Recipe, Shuffled, Silence, fit

PAD, START, END, WORDS, LONGEST, STEPS = 0, 1, 2, 29, 8, 220


def ids(letters: str) -> list[int]:
    """'a c b' -> [3, 5, 4]."""
    return [ord(letter) - ord("a") + 3 for letter in letters.split()]


def batch(pairs: list[Pair]) -> dict[str, Tensor]:
    """Source b n and target b m, the end included, with how many of each row are real."""
    found: dict[str, Tensor] = {}
    for name, rows in (("source", [ids(x.source) for x in pairs]), ("target", [[*ids(x.target), END] for x in pairs])):
        found[name] = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
        found[f"{name}_lengths"] = torch.tensor([len(row) for row in rows])
    return found


def trained(seed: int, smoothing: float = 0.0) -> Transformer:
    """One layer that reads and one that writes, always fed the truth, dropout 0.1."""
    torch.manual_seed(seed)
    sizes = {"dim": 48, "heads": 4, "hidden": 96, "encoder_layers": 1, "decoder_layers": 1}
    tokens = {"source_vocabulary": WORDS, "target_vocabulary": WORDS, "start": START}
    model = Transformer(TransformerConfig(**tokens, **sizes, smoothing=smoothing))
    pairs = list(Generated(Sort(shortest=3, longest=LONGEST), size=3200, seed=seed))
    batches = Shuffled([batch(pairs[n : n + 32]) for n in range(0, len(pairs), 32)])
    recipe = Recipe(steps=STEPS, rate=Cosine(5e-3, steps=STEPS, warmup=20), seed=seed)
    with tempfile.TemporaryDirectory() as run:
        fit(model, batches, recipe, folder=run, show=Silence())
    return model.eval()


test = list(Generated(Sort(shortest=3, longest=LONGEST), size=400, seed=99))
data, truth = batch(test), [(*ids(pair.target), END) for pair in test]
counted = torch.arange(data["target"].shape[1]) < data["target_lengths"][:, None]  # b m
asked = {"source": data, "prefix": [[START]] * len(test), "end": END, "max_length": LONGEST + 3}


def exact(found: list[Hypothesis]) -> float:
    """How many sequences are right, in per cent."""
    return 100 * sum(one.tokens == right for one, right in zip(found, truth, strict=True)) / len(truth)


members, smoothed = [trained(seed) for seed in range(3)], trained(0, smoothing=0.1)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2), constrained_layout=True)

# Fed the truth, as in training, and fed what it wrote itself; sure with smoothing and without.

alone = greedy(members[0], **asked)
written = pad_sequence([torch.tensor(one.tokens) for one in alone], batch_first=True, padding_value=PAD)
said = {"fed itself": torch.nn.functional.pad(written, (0, 9))[:, : counted.shape[1]]}
for name, model in {"plain": members[0], "smoothed": smoothed}.items():
    with torch.no_grad():  # b m words
        logits = model(data["source"], shifted(data["target"], start=START), source_lengths=data["source_lengths"])
    p, likeliest = logits.softmax(-1).max(-1)  # b m twice
    said.setdefault("fed the truth", likeliest)
    loss = cross_entropy(logits, data["target"], counted=counted).mean
    hit = (likeliest == data["target"])[counted].float().mean()
    print(f"{name}: loss {loss:.3f}, sure {p[counted].mean():.1%}, right {hit:.1%}", end="")
    print(f", {exact(greedy(model, **asked)):.1f} % of the sequences")
    middle.hist(p[counted], bins=20, range=(0, 1), alpha=0.6, label=name)
for name, tokens in said.items():
    by_place = ((tokens == data["target"]) & counted).sum(0) / counted.sum(0)
    print(f"{name}: right in {by_place[1]:.1%} of the second places, in {by_place[7]:.1%} of the eighth")
    left.plot(range(1, len(by_place) + 1), by_place, marker="o", markersize=3, label=name)
left.set(xlabel="place in the target", ylabel="right", title="forcing")
middle.set(xlabel="probability of the likeliest token", ylabel="tokens", title="smoothing", yscale="log")

# What a wider beam finds, whom to blame when the best it finds is wrong, and what three models know together.

bars = {"one model": exact(alone)}
known = [one[0].log_probability for one in score(members[0], data, asked["prefix"], [[x] for x in truth])]
for width in (2, 8):
    found = [one[0] for one in beam(members[0], width=width, **asked)]
    bars[f"beam of {width}"] = exact(found)
    gain = sum(one.log_probability - old.log_probability for one, old in zip(found, alone, strict=True)) / len(found)
    margin = [right - one.log_probability for right, one in zip(known, found, strict=True)]
    likelier, less = (100 * sum(sign * x > 1e-4 for x in margin) / len(margin) for sign in (1, -1))
    print(f"beam of {width}: log p {gain:+.3f}; the truth is likelier in {likelier:.1f} %, less likely in {less:.1f} %")
bars["ensemble of 3"] = exact(greedy(Ensemble(members), **asked))
merged = Transformer(members[0].config).eval()
merged.load_state_dict(average(one.state_dict() for one in members))
bars["mean of weights"] = exact(greedy(merged, **asked))
print(", ".join(f"{name} {value:.1f} %" for name, value in bars.items()))
print("the others alone: " + ", ".join(f"{exact(greedy(one, **asked)):.1f} %" for one in members[1:]))
right.barh(list(bars), list(bars.values()), color="#5c4a8a")
right.invert_yaxis()
right.set(xlabel="sequences exactly right, %", title="decoding")
for panel in (left, middle, right):
    panel.spines[["top", "right"]].set_visible(False)
for panel in (left, middle):
    panel.legend(fontsize=8, frameon=False)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "11_training.png", dpi=90)
print(f"wrote {folder / '11_training.png'}")
