"""The equation as matrices: scores, scale, mask, softmax, and the product with the values, with shapes and numbers."""

from __future__ import annotations

import torch
from drawing import OUTPUT, PLAIN, VALUE, arrow, matrix, paper, write
from matplotlib.figure import Figure
from torch import Tensor

from regard import Causal, Dot, attend, weights

Q = torch.tensor([[1.0, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 0], [0, 0, 2, 1]])
K = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1]])
V = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])


def steps() -> dict[str, Tensor]:
    """The matrices after each step."""
    q, k, v = Q[None, None], K[None, None], V[None, None]
    masked = weights(q, k, mask=Causal())
    found = {
        "scores": weights(q, k, score=Dot(scale=1.0)).scores[...],
        "scaled": weights(q, k).scores[...],
        "masked": masked.scores[...],
        "weights": masked[...],
        "out": attend(q, k, v, mask=Causal()),
    }
    return {name: x[0, 0] for name, x in found.items()}


def draw() -> Figure:
    """Two rows of matrices for four tokens of width 4, values of width 2."""
    figure, axes = paper(5.2, 4.15)
    found, cell = steps(), 0.34
    above = (("scores", "$Q K^T$", "{:.0f}"), ("scaled", "$/ \\sqrt{4}$", "{:.1f}"), ("masked", "mask", "{:.1f}"))
    for n, (name, title, numbers) in enumerate(above):
        x = 0.2 + 1.7 * n
        write(axes, x + 0.68, 0.2, f"{n + 1}. {title}")
        matrix(axes, x, 0.38, found[name], cell, fill=PLAIN, numbers=numbers)
        write(axes, x + 0.68, 1.9, "4 × 4", size=8)
        if n < 2:
            arrow(axes, (x + 1.4, 1.06), (x + 1.66, 1.06))
    write(axes, 0.88, 2.27, "4. softmax of each row")
    matrix(axes, 0.2, 2.45, found["weights"], cell)
    write(axes, 0.88, 3.97, "weights A, 4 × 4", size=8)
    write(axes, 1.9, 3.13, "×", size=12)
    write(axes, 2.5, 2.27, "5. values $V$")
    matrix(axes, 2.16, 2.45, V, cell, fill=VALUE, numbers="{:.0f}")
    write(axes, 2.5, 3.97, "4 × 2", size=8)
    write(axes, 3.2, 3.13, "=", size=12)
    write(axes, 3.9, 2.27, "output")
    matrix(axes, 3.56, 2.45, found["out"], cell, fill=OUTPUT)
    write(axes, 3.9, 3.97, "4 × 2", size=8)
    for row, word in enumerate(("The", "cat", "sat", "down")):
        write(axes, 4.35, 2.62 + cell * row, word, ha="left", size=8)
    return figure
