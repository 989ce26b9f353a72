"""One query over three keys and values, with numbers: scores, weights, and the weighted sum."""

from __future__ import annotations

import torch
from drawing import KEY, OUTPUT, PLAIN, QUERY, VALUE, arrow, matrix, paper, write
from matplotlib.figure import Figure
from torch import Tensor

from regard import attend, weights

Q = torch.tensor([[2.0, 1.0]])
K = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, -1.0]])
V = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])


def steps() -> dict[str, Tensor]:
    """The scores, weights and output of the query."""
    q, k, v = Q[None, None], K[None, None], V[None, None]
    A = weights(q, k)
    return {"scores": A.scores[...][0, 0], "weights": A[...][0, 0], "out": attend(q, k, v)[0, 0]}


def draw() -> Figure:
    """A row for each key."""
    figure, axes = paper(5.2, 2.35)
    found, words = steps(), ("cat", "sat", "mat")
    write(axes, 0.5, 0.55, "query $q$")
    matrix(axes, 0.16, 0.95, Q, fill=QUERY, numbers="{:.0f}")
    for x, name in ((1.65, "keys $k_j$"), (2.55, "score"), (3.4, "weight"), (4.4, "values $v_j$")):
        write(axes, x, 0.25, name)
    write(axes, 2.55, 1.65, "$q \\cdot k_j / \\sqrt{2}$", size=8)
    write(axes, 3.4, 1.65, "sum 1", size=8)
    for n, word in enumerate(words):
        y = 0.42 + 0.37 * n
        matrix(axes, 1.31, y, K[n : n + 1], fill=KEY, numbers="{:.0f}")
        write(axes, 1.15, y + 0.17, word, size=8)
        matrix(axes, 2.36, y, found["scores"].T[n : n + 1], fill=PLAIN)
        matrix(axes, 3.22, y, found["weights"].T[n : n + 1])
        matrix(axes, 4.06, y, V[n : n + 1], fill=VALUE, numbers="{:.1f}")
        arrow(axes, (2.02, y + 0.17), (2.33, y + 0.17))
        arrow(axes, (2.74, y + 0.17), (3.18, y + 0.17))
        write(axes, 3.81, y + 0.17, "×")
    arrow(axes, (4.4, 1.53), (4.4, 1.78))
    matrix(axes, 4.06, 1.82, found["out"], fill=OUTPUT)
    write(axes, 3.95, 1.99, "output: the weighted sum of the values", ha="right")
    return figure
