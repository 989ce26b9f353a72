"""Sequence to sequence with attention: each step of the decoder takes a weighted sum of all states of the encoder."""

from __future__ import annotations

import torch
from drawing import KEY, OUTPUT, QUERY, arrow, box, paper, write
from matplotlib.figure import Figure
from torch import Tensor

from regard import Dot, weights

SOURCE = (3, 9, 1, 7)


def shares(step: int) -> Tensor:
    """The weights of one step over the four states: it asks for the state of the digit that it writes."""
    turn = 0.8 * torch.arange(4.0)
    h = torch.stack([turn.cos(), turn.sin()], -1)[None, None]  # b h j d
    return weights(h[:, :, [3 - step]], h, score=Dot(scale=4.0))[...][0, 0, 0]


def draw() -> Figure:
    """The second step, its four weights and its context."""
    figure, axes = paper(5.2, 2.5)
    a = shares(1)
    for n, digit in enumerate(SOURCE):
        x = 0.15 + 0.62 * n
        write(axes, x + 0.2, 2.1, str(digit))
        arrow(axes, (x + 0.2, 2.0), (x + 0.2, 1.8))
        box(axes, x, 1.45, 0.4, 0.33, f"$h_{n + 1}$", KEY)
        if n < 3:
            arrow(axes, (x + 0.4, 1.61), (x + 0.62, 1.61))
        arrow(axes, (x + 0.2, 1.45), (1.45, 0.72), width=0.3 + 3.5 * float(a[n]))
        beside = {"ha": "right" if n < 2 else "left"}
        write(axes, x + (0.13 if n < 2 else 0.27), 1.33, f"{float(a[n]):.2f}", size=8, **beside)
    box(axes, 1.2, 0.42, 0.5, 0.3, "$c_2$", QUERY)
    write(axes, 1.45, 0.25, "the sum of $a_{2j}\\,h_j$", size=8)
    arrow(axes, (1.7, 0.57), (3.62, 1.5), bend=-0.15)
    for n, digit in enumerate(reversed(SOURCE)):
        x = 2.95 + 0.57 * n
        arrow(axes, (2.41 if n == 0 else x - 0.17, 1.61), (x, 1.61))
        box(axes, x, 1.45, 0.4, 0.33, f"$s_{n + 1}$", OUTPUT)
        arrow(axes, (x + 0.2, 1.45), (x + 0.2, 1.2))
        write(axes, x + 0.2, 1.07, str(digit))
    write(axes, 1.25, 2.35, "the encoder reads")
    write(axes, 4.0, 2.35, "the decoder writes")
    write(axes, 3.35, 0.45, "step 2 has a context\nof its own", size=8)
    return figure
