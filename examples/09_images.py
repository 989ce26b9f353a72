# --8<-- [start:code]
"""Attention in images: a grid is a sequence of places. A ViT looks at patches, a captioner looks while it writes.

Writes 09_digits.png, where the class of a digit comes from, and 09_caption.png, where each word of a caption looked.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from regard.data import Generated, Scenes, digits
from regard.decode import greedy
from regard.lens import capture, rollout
from regard.models import Captioner, CaptionerConfig, ViT, ViTClassifier, ViTConfig
from regard.views import caption
from regard.views.figures.canvas import WHITE_TO_DARK

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")


def train(model, batches, rate):
    """Adam, once through the batches, its rate falling to nearly 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, len(batches))
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        falling.step()
    model.eval()


# Patches as words: digits of 8 x 8 pixels, cut into 4 x 4 patches, a class token before them.
parts = digits("train"), digits("test")
image, new = (torch.from_numpy(part.images)[:, None] / 255 - 0.3 for part in parts)  # b 1 8 8
label, right = (torch.from_numpy(part.labels) for part in parts)  # b
torch.manual_seed(0)
vit = ViTClassifier(ViT(ViTConfig(image=8, patch=2, channels=1, dim=48, depth=2, heads=4, hidden=96)), classes=10)
train(vit, [{"image": image[rows], "label": label[rows]} for rows in torch.randint(len(image), (250, 64))], 2e-3)
with capture(vit) as tape, torch.no_grad():
    said = vit(new).argmax(-1)
print(f"{tape}\nViT: {(said == right).float().mean():.1%} of {len(right)} new digits")
ink = nn.functional.avg_pool2d(new, 2).flatten(1)  # b 16: how much is drawn in each patch
come = rollout(list(tape.values()), token=0)[:, 1:]  # b 16: where the class token comes from
print(f"correlation of ink and rollout over patches: {torch.corrcoef(torch.stack([ink, come]).flatten(1))[0, 1]:.2f}")

# Words that look: a decoder asks 6 x 6 places of an image, of which each has seen 9 x 9 pixels.
scenes, test = (list(Generated(Scenes(pixels=24, most=1), size=size, seed=size)) for size in (6400, 300))
words = ["<pad>", "<start>", "<end>", *sorted({word for scene in scenes for word in scene.caption.split()})]


def described(scenes):
    """Images b 3 24 24, and captions b 5: four words and the end."""
    images = torch.stack([torch.from_numpy(scene.image) for scene in scenes]).permute(0, 3, 1, 2) / 255
    told = [[words.index(word) for word in (*scene.caption.split(), "<end>")] for scene in scenes]
    return {"image": images, "target": torch.tensor(told)}


torch.manual_seed(0)
eyes = nn.Sequential(nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())  # -> b 32 6 6
sizes = {"widths": (32,), "dim": 64, "hidden": 128, "attention": "transformer", "heads": 4, "dropout": 0.0}
captioner = Captioner(CaptionerConfig(vocabulary=len(words), start=1, **sizes), features=eyes)
train(captioner, [described(scenes[n % len(scenes) :][:32]) for n in range(0, 300 * 32, 32)], 4e-3)
batch = described(test)
told = greedy(captioner.watched("cross.0"), batch, [[1]] * len(test), end=2, min_length=4, max_length=8)
hits = torch.tensor([list(one.tokens) == asked for one, asked in zip(told, batch["target"].tolist(), strict=True)])
print(f"captioner: {hits.float().mean():.1%} of {len(test)} new scenes exactly right")
looks = torch.stack([one.attention["cross.0"].mean(0)[:4] for one in told])  # b 4 36: a, its size, its colour, its form
left, top, far, bottom = torch.tensor([scene.shapes[0].box for scene in test]).T[..., None] / 4 - torch.arange(6)
down, across = ((end.clamp(0, 1) - begin.clamp(0, 1)) for begin, end in ((top, bottom), (left, far)))  # b 6 each
shape = (down[:, :, None] * across[:, None]).flatten(1)  # b 36: how much of each place the shape's box covers
inside = (looks * shape[:, None]).sum(-1)  # b 4
shares = ", ".join(f"{x} {y:.1%}" for x, y in zip(("a", "size", "colour", "form"), inside.mean(0), strict=True))
print(f"attention on the shape: {shares}; its box covers {shape.mean():.1%}")
n = inside[:, 1:].mean(1).masked_fill(~hits, torch.nan).nanmedian(0).indices  # a typical one of those that are right
# --8<-- [end:code]
# --8<-- [start:figures]

scene = 0.4 + 0.6 * torch.from_numpy(test[n].image) / 255  # lighter than it is, so that the colours above it are seen
caption(looks[n], scene, test[n].caption.split(), patches=(6, 6)).savefig(folder / "09_caption.png", dpi=110)
plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(2, 8, figsize=(9, 2.8), subplot_kw={"xticks": [], "yticks": []})
for n, (above, below) in enumerate(panels.T):
    above.imshow(new[n, 0], cmap="gray_r", extent=(0, 8, 8, 0))
    below.imshow(come[n].view(4, 4), cmap=WHITE_TO_DARK, extent=(0, 8, 8, 0), vmin=0, vmax=1.3 * come[n].max())
    for place in come[n].topk(4).indices.tolist():  # frame the four patches with most attention
        corner = 2 * (place % 4), 2 * (place // 4)
        above.add_patch(plt.Rectangle(corner, 2, 2, fill=False, edgecolor="#b5367a", linewidth=2))
    above.set_title(f"says {said[n]}", color="black" if said[n] == right[n] else "red")
figure.savefig(folder / "09_digits.png")
# --8<-- [end:figures]
