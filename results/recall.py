"""Recall of a value in a long text: what reaches 32,768 tokens back. (What it costs: `reading`.)

    python -m results.recall --attention window --out runs/window

A text of random words holds, somewhere, a key and a value behind it, and ends with the key: which was the value?
An encoder of three layers reads it with full attention, within a window, within a window and by way of a few global
tokens, or piece by piece with a memory of the pieces before. It begins with short texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.transformer import TransformerConfig, TransformerEncoder
from regard.nn.losses import Loss, cross_entropy
from regard.train import InverseSquareRoot, own_device

from .script import parser, train

WORDS, KEY = 64, 64
TEXTS = 2  # of the full length in a batch; more of shorter ones
ATTENTION = ("full", "window", "global", "memory")


def terms(attention: str, window: int) -> dict[str, Any]:
    """What of a Transformer's config makes it read so."""
    match attention:
        case "window":
            return {"encoder_mask": f"Window({window})"}
        case "global":
            return {"encoder_mask": f"Window({window}) | Global(16)"}
        case "memory":
            return {"segment": 2048, "memory": 2048}
    return {}


class Recaller(nn.Module):
    """The value behind the key that the text ends with."""

    def __init__(self, attention: str, window: int) -> None:
        super().__init__()
        config = TransformerConfig(
            source_vocabulary=WORDS + 1,
            target_vocabulary=WORDS,
            start=0,
            dim=128,
            heads=2,
            hidden=512,
            encoder_layers=3,
            positions="rotary",
            rotary_base=1e6,  # with 10,000 the slowest features turn about between one end and the other
            dropout=0.0,
            **terms(attention, window),
        )
        self.encoder = TransformerEncoder(config)
        self.value = nn.Linear(config.dim, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.value(self.encoder(ids)[:, -1])

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Over `value` (b,), from `ids` (b, n)."""
        return cross_entropy(self(batch["ids"]), batch["value"])


class Texts:
    """Batches of texts: of 8 words at first, then of twice as many in each stage, up to the full length."""

    def __init__(self, length: int, steps: int, seed: int) -> None:
        self.lengths = [8 * 2**stage for stage in range(16) if 8 * 2**stage < length] + [length]
        self.steps, self.seed, self.step = max(1, steps), seed, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self.step += 1
            length = self.lengths[min(len(self.lengths) * self.step // self.steps, len(self.lengths) - 1)]
            yield texts(length, TEXTS * self.lengths[-1] // length, self.seed + self.step)

    def state(self) -> dict[str, Any]:
        """How many batches are behind."""
        return {"step": self.step}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go on behind as many."""
        self.step = int(state["step"])


def texts(length: int, rows: int, seed: int) -> dict[str, Tensor]:
    """So many texts of a length, by a seed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    place = torch.randint(length - 2, (rows, 1), generator=generator)
    value = ids.gather(1, place + 1)[:, 0]
    ids.scatter_(1, place, KEY)
    ids[:, -1] = KEY
    return {"ids": ids, "value": value}


def main() -> None:
    """Train, and judge at the full length."""
    flags = parser(__doc__, steps=3000)
    flags.add_argument("--attention", choices=ATTENTION, required=True)
    flags.add_argument("--length", type=int, default=32_768)
    flags.add_argument("--window", type=int, default=512)
    given = flags.parse_args()
    torch.manual_seed(given.seed)
    unseen = [texts(given.length, TEXTS, 10**6 + n) for n in range(64)]

    def evaluate(model: Recaller) -> dict[str, float]:
        right = 0
        for batch in unseen:
            right += int((model(batch["ids"].to(own_device())).argmax(-1).cpu() == batch["value"]).sum())
        return {"accuracy": 100 * right / (TEXTS * len(unseen))}

    batches = Texts(given.length, given.steps, 10**7 * (1 + given.seed))
    model = Recaller(given.attention, given.window)
    every = max(1, given.steps // 10)
    # The longest texts come last, few to a batch: by then steps are small, but not yet nothing.
    rate = InverseSquareRoot(1e-3, warmup=max(1, min(given.steps // 10, 150)))
    judged: dict[str, Any] = {"metric": "accuracy", "better": "higher", "unit": "texts"}
    train(given, model, batches, evaluate, rate=rate, evaluate_every=every, **judged)


if __name__ == "__main__":
    main()
