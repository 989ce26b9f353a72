"""Attention in images: a grid is a sequence of places. A ViT looks at patches, a captioner looks while it writes.

Writes 09_digits.png, where the class of a digit comes from, and 09_caption.png, where each word of a caption looked.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data import Generated, Scene, Scenes, digits
from regard.decode import greedy
from regard.lens import capture, rollout
from regard.models import Captioner, CaptionerConfig, ViT, ViTClassifier, ViTConfig
from regard.views import caption

PIXELS, GRID, START, END = 24, 6, 1, 2
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
folder.mkdir(parents=True, exist_ok=True)


def train(model: nn.Module, batches: list[dict[str, Tensor]], rate: float) -> None:
    """Adam, once through the batches, its rate falling to nearly 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, len(batches))
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        falling.step()
    model.eval()


# Patches as words: digits of 8 x 8 pixels, cut into 4 x 4 patches, a class token before them.

(image, label), (new, right) = (
    (torch.from_numpy(part.images)[:, None] / 255 - 0.3, torch.from_numpy(part.labels))  # b 1 8 8 and b
    for part in (digits("train"), digits("test"))
)
torch.manual_seed(0)
vit = ViTClassifier(ViT(ViTConfig(image=8, patch=2, channels=1, dim=48, depth=2, heads=4, hidden=96)), classes=10)
draws = torch.randint(len(image), (250, 64))
train(vit, [{"image": image[rows], "label": label[rows]} for rows in draws], 2e-3)
with capture(vit) as tape, torch.no_grad():
    said = vit(new).argmax(-1)
print(f"{tape}\nViT: {(said == right).float().mean():.1%} of {len(right)} new digits")
ink = F.avg_pool2d(new, 2).flatten(1)  # b 16: how much is drawn in each patch
looks = rollout(list(tape.values()), token=0)[:, 1:]  # b 16: where the class token comes from
together = torch.corrcoef(torch.stack([ink.flatten(), looks.flatten()]))[0, 1]
print(f"correlation of ink and rollout over patches: {together:.2f}")
figure, panels = plt.subplots(2, 8, figsize=(8, 2.3), constrained_layout=True)
for n in range(8):
    panels[0, n].imshow(new[n, 0], cmap="gray_r")
    panels[1, n].imshow(looks[n].view(4, 4), cmap="magma")
    panels[0, n].set_title(f"says {said[n]}", fontsize=8, color="black" if said[n] == right[n] else "red")
for panel in panels.flat:
    panel.set(xticks=[], yticks=[])
figure.savefig(folder / "09_digits.png", dpi=90)

# Words that look: a decoder asks 6 x 6 places of an image, of which each has seen 9 x 9 pixels.

scenes, test = (list(Generated(Scenes(pixels=PIXELS, most=1), size=size, seed=size)) for size in (6400, 300))
words = ["<pad>", "<start>", "<end>", *sorted({word for scene in scenes for word in scene.caption.split()})]


def described(scenes: list[Scene]) -> dict[str, Tensor]:
    """Images b 3 24 24, captions b m and how long they are, the end included."""
    told = [torch.tensor([words.index(word) for word in scene.caption.split()] + [END]) for scene in scenes]
    return {
        "image": torch.stack([torch.from_numpy(scene.image) for scene in scenes]).permute(0, 3, 1, 2) / 255,
        "target": nn.utils.rnn.pad_sequence(told, batch_first=True),
        "target_lengths": torch.tensor([len(one) for one in told]),
    }


def box(scene: Scene) -> Tensor:
    """How much of each place the shape's box covers, row by row: 36."""
    left, top, right, bottom = scene.shapes[0].box
    covered = torch.zeros(1, PIXELS, PIXELS)
    covered[:, top:bottom, left:right] = 1.0
    return F.avg_pool2d(covered, PIXELS // GRID).flatten()


torch.manual_seed(0)
eyes = nn.Sequential(
    nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()
)
sizes = CaptionerConfig(
    vocabulary=len(words), start=START, widths=(32,), dim=64, hidden=128, attention="transformer", heads=4, dropout=0.0
)
captioner = Captioner(sizes, features=eyes)
train(captioner, [described(scenes[n % len(scenes) :][:32]) for n in range(0, 300 * 32, 32)], 4e-3)
batch = described(test)
grid = captioner.features(batch["image"])
print(f"image {tuple(batch['image'].shape)}, grid {tuple(grid.shape)}, places {tuple(captioner.places(grid).shape)}")
told = greedy(captioner.watched("cross.0"), batch, [[START]] * len(test), end=END, min_length=4, max_length=8)
captions = [" ".join(words[word] for word in one.tokens[:-1]) for one in told]
exact = sum(text == scene.caption for text, scene in zip(captions, test, strict=True)) / len(test)
print(f"captioner: {exact:.1%} of {len(test)} new scenes exactly right")
looks = [one.attention["cross.0"].mean(0)[:4] for one in told]  # 4 36 each: a, its size, its colour, its form
inside = torch.stack([look @ box(scene) for look, scene in zip(looks, test, strict=True)])  # b 4
shares = zip(("a", "size", "colour", "form"), inside.mean(0).tolist(), strict=True)
print("attention on the shape: " + ", ".join(f"{word} {share:.1%}" for word, share in shares), end="")
print(f"; its box covers {sum(box(scene).mean() for scene in test) / len(test):.1%}")
right = [n for n in inside[:, 1:].mean(1).argsort().tolist() if captions[n] == test[n].caption]
n = right[len(right) // 2]  # neither the best nor the worst
caption(looks[n], test[n].image, captions[n].split(), patches=(GRID, GRID)).savefig(folder / "09_caption.png", dpi=70)
print(f"wrote {folder / '09_digits.png'} and {folder / '09_caption.png'}")
