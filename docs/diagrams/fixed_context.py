"""Sequence to sequence with its bottleneck: everything the decoder reads of the source is one vector."""

from __future__ import annotations

import torch
from drawing import KEY, OUTPUT, PLAIN, QUERY, arrow, box, paper, write
from matplotlib.figure import Figure

from regard.models import Seq2Seq, Seq2SeqConfig

HIDDEN, SOURCE = 32, (3, 9, 1, 7)


def numbers_seen(length: int) -> int:
    """How many numbers the decoder gets of a source of this length."""
    sizes = {"source_vocabulary": 12, "target_vocabulary": 12, "start": 0, "dim": 8, "hidden": HIDDEN}
    model = Seq2Seq(Seq2SeqConfig(attention=None, **sizes)).eval()
    return sum(x.numel() for x in model.start({"source": torch.full((1, length), 2)}).hidden)


def draw() -> Figure:
    """Four digits are read, squeezed into a vector, and written backwards."""
    figure, axes = paper(5.2, 1.75)
    for n, digit in enumerate(SOURCE):
        x = 0.15 + 0.5 * n
        write(axes, x + 0.18, 1.35, str(digit))
        arrow(axes, (x + 0.18, 1.25), (x + 0.18, 1.0))
        box(axes, x, 0.65, 0.36, 0.33, f"$h_{n + 1}$", KEY)
        arrow(axes, (x + 0.36, 0.81), (x + (0.5 if n < 3 else 0.6), 0.81))
    box(axes, 2.25, 0.68, 0.62, 0.27, "$c$", QUERY)
    write(axes, 2.56, 0.45, f"{numbers_seen(len(SOURCE))} numbers,", size=8)
    write(axes, 2.56, 1.2, "whatever\nthe length", size=8)
    for n, digit in enumerate(reversed(SOURCE)):
        x = 3.2 + 0.5 * n
        arrow(axes, (2.87 if n == 0 else x - 0.14, 0.81), (x, 0.81))
        box(axes, x, 0.65, 0.36, 0.33, f"$s_{n + 1}$", OUTPUT if n < 4 else PLAIN)
        arrow(axes, (x + 0.18, 0.65), (x + 0.18, 0.4))
        write(axes, x + 0.18, 0.28, str(digit))
    write(axes, 0.93, 1.6, "the encoder reads")
    write(axes, 4.13, 1.6, "the decoder writes")
    return figure
