# A Vision Transformer over a handwritten digit: choose a head, then "Images" to see which patches a patch looks at.
import torch

from regard.data import digits
from regard.lens import capture
from regard.models import ViT, ViTClassifier, ViTConfig

parts = digits("train"), digits("test")
image, new = (torch.from_numpy(part.images)[:, None] / 255 - 0.3 for part in parts)  # b 1 8 8
label = torch.from_numpy(parts[0].labels)
torch.manual_seed(0)
config = ViTConfig(image=8, patch=2, channels=1, dim=48, depth=2, heads=4, hidden=96)
vit = ViTClassifier(ViT(config), classes=10)
optimizer = torch.optim.Adam(vit.parameters(), lr=2e-3)
for rows in torch.randint(len(image), (150, 64)):
    optimizer.zero_grad()
    vit.loss({"image": image[rows], "label": label[rows]}).mean.backward()
    optimizer.step()

with capture(vit.eval()) as tape, torch.no_grad():
    vit(new[:1])
tape.picture(parts[1].images[0], patches=(4, 4))
tape
