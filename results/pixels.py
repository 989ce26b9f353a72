"""A Gpt that writes digits pixel by pixel, row by row, behind their class.

python -m results.pixels --out runs/pixels

The bits a pixel are those of digits it has not seen; `samples.png` has ten it drew of each class.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regard.data import digits
from regard.decode import sample
from regard.models import Gpt, GptConfig
from regard.train import Shuffled, own_device

from .script import falling, parser, train

GREYS, CLASSES, SIDE = 17, 10, 8
ROWS = 64


def rows_of(part: str) -> Tensor:
    """The class of each digit, as a token behind the greys, and its pixels."""
    found = digits(part)
    pixels = torch.from_numpy(np.rint(found.images / 255 * (GREYS - 1)).astype(np.int64)).flatten(1)
    return torch.cat((torch.from_numpy(found.labels)[:, None] + GREYS, pixels), 1)


def main() -> None:
    """Train, judge, and draw."""
    given = parser(__doc__, steps=3000).parse_args()
    torch.manual_seed(given.seed)
    config = GptConfig(
        vocabulary=GREYS + CLASSES,
        length=SIDE**2,
        dim=192,
        depth=6,
        heads=6,
        dropout=0.25,
        attention_dropout=0.0,
    )
    model, seen, unseen = Gpt(config), rows_of("train"), rows_of("test")

    def evaluate(model: Gpt) -> dict[str, float]:
        loss = model.loss({"ids": unseen.to(own_device())})
        return {"bits": float(loss.mean) / math.log(2)}

    batches = Shuffled([{"ids": seen[first : first + ROWS]} for first in range(0, len(seen), ROWS)])
    train(given, model, batches, evaluate, rate=falling(given, 1e-3), evaluate_every=250, metric="bits")
    labels = torch.arange(CLASSES).repeat_interleave(CLASSES)[:, None] + GREYS
    drawn = sample(model.eval(), None, labels.to(own_device()), end=None, max_length=SIDE**2, seed=given.seed)
    greys = torch.tensor([one.tokens for [one] in drawn]).clamp(max=GREYS - 1).view(CLASSES, CLASSES, SIDE, SIDE)
    sheet = greys.permute(0, 2, 1, 3).reshape(CLASSES * SIDE, CLASSES * SIDE)
    picture = Image.fromarray((sheet * 255 // (GREYS - 1)).to(torch.uint8).numpy())
    picture.resize((CLASSES * SIDE * 6,) * 2, Image.Resampling.NEAREST).save(given.out / "samples.png")


if __name__ == "__main__":
    main()
