"""The online softmax: a row of scores is read in blocks of two; a maximum, a sum and a vector are kept and rescaled."""

from __future__ import annotations

import math

import torch
from drawing import OUTPUT, PLAIN, QUERY, VALUE, arrow, matrix, paper, write
from matplotlib.figure import Figure
from torch import Tensor

from regard import Dot, attend, weights

SCORES, VALUES = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 2.0, 1.0, 3.0, 0.0])
BLOCK = 2


def steps() -> list[tuple[float, float, float]]:
    """The maximum m, the sum l and the vector o (here one number) after each block."""
    m, l, o = torch.tensor(float("-inf")), torch.tensor(0.0), torch.tensor(0.0)
    found = []
    for s, v in zip(SCORES.split(BLOCK), VALUES.split(BLOCK), strict=True):
        new = torch.maximum(m, s.max())
        l = l * (m - new).exp() + (s - new).exp().sum()
        o = o * (m - new).exp() + (s - new).exp() @ v
        m = new
        found.append((m.item(), l.item(), o.item()))
    return found


def answers() -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of the operator for the same scores."""
    q, k, v = torch.ones(1, 1, 1, 1), SCORES[None, None, :, None], VALUES[None, None, :, None]
    A = weights(q, k, score=Dot(scale=1.0))
    return attend(q, k, v, score=Dot(scale=1.0))[0, 0, 0, 0], A.scores[...].logsumexp(-1)[0, 0, 0]


def draw() -> Figure:
    """The row above, what is kept after each block below."""
    figure, axes = paper(5.2, 3.1)
    out, statistic = answers()
    write(axes, 0.75, 0.27, "scores $s$", ha="right")
    write(axes, 0.75, 0.66, "values $v$", ha="right")
    kept = steps()
    for n, (s, v) in enumerate(zip(SCORES.split(BLOCK), VALUES.split(BLOCK), strict=True)):
        x = 0.95 + 1.5 * n
        matrix(axes, x, 0.1, s[None], 0.36, fill=PLAIN, numbers="{:.0f}")
        matrix(axes, x, 0.5, v[None], 0.36, fill=VALUE, numbers="{:.0f}")
        arrow(axes, (x + 0.36, 0.9), (x + 0.36, 1.2))
        for row, (name, value, fill) in enumerate(zip("mlo", kept[n], (QUERY, QUERY, OUTPUT), strict=True)):
            y = 1.25 + 0.38 * row
            matrix(axes, x + 0.1, y, torch.tensor([[value]]), 0.36, fill=fill)
            write(axes, x - 0.02, y + 0.18, f"${name}$")
        if n < 2:
            rescale = torch.tensor(kept[n][0] - kept[n + 1][0]).exp().item()
            arrow(axes, (x + 0.55, 1.81), (x + 1.36, 1.81))
            write(axes, x + 0.95, 1.68, f"× {rescale:.2f}", size=8)
    m, l, o = kept[-1]
    write(axes, 2.6, 2.62, f"output = o / l = {o / l:.3f}, as attend returns: {out.item():.3f}")
    write(axes, 2.6, 2.86, f"m + log l = {m + math.log(l):.3f}, the log-sum-exp: {statistic.item():.3f}")
    return figure
