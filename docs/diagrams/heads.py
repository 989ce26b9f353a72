"""Multi-head attention on the vector of one token: split into heads, attend in each, merge, and mix by W_o."""

from __future__ import annotations

import torch
from drawing import OUTPUT, PLAIN, QUERY, arrow, box, matrix, paper, write
from matplotlib.figure import Figure
from torch import Tensor

from regard.nn import Attention

DIM, HEADS, TOKENS, TOKEN = 8, 4, 5, 2


def steps() -> dict[str, Tensor]:
    """The numbers of one token: its query, the parts of the heads, what each head returns, and the output."""
    torch.manual_seed(1)
    layer, x = Attention(DIM, heads=HEADS, biased="").eval(), 2 * torch.randn(1, TOKENS, DIM)
    with torch.no_grad():
        q, v = layer.query(x), layer.value(x)  # b n (h d)
        split = v.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # b h n d
        heads = (layer.weights(x) @ split)[0, :, TOKEN]  # h d
        out = layer(x)[0, TOKEN]
    return {"x": x[0, TOKEN], "q": q[0, TOKEN], "heads": heads, "out": out, "mix": layer.out.weight.detach()}


def draw() -> Figure:
    """From the top down."""
    figure, axes = paper(5.2, 3.55)
    found, cell = steps(), 0.45

    def strip(y: float, name: str, values: Tensor, fill: str) -> None:
        write(axes, 1.2, y + 0.17, name, ha="right")
        matrix(axes, 1.35, y, values[None], cell, fill=fill, size=8)

    strip(0.1, "token $x_i$", found["x"], PLAIN)
    write(axes, 3.3, 0.68, "times $W_q$: all heads at once", size=8, ha="left")
    arrow(axes, (3.15, 0.56), (3.15, 0.82))
    strip(0.85, "query", found["q"], QUERY)
    for h in range(HEADS):
        x = 1.3 + 0.93 * h
        arrow(axes, (x + 0.45, 1.31), (x + 0.45, 1.55))
        box(axes, x, 1.58, 0.86, 0.42, f"head {h}\n2 numbers", QUERY)
        arrow(axes, (x + 0.45, 2.0), (x + 0.45, 2.24))
    write(axes, 1.2, 1.68, "split, attend", ha="right")
    write(axes, 1.2, 1.87, "to all tokens", ha="right")
    strip(2.27, "merge", found["heads"].flatten(), OUTPUT)
    arrow(axes, (3.15, 2.73), (3.15, 2.99))
    write(axes, 3.3, 2.85, "times $W_o$: heads are mixed", size=8, ha="left")
    strip(3.02, "output", found["out"], PLAIN)
    return figure
