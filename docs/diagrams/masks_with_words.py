"""Four masks with words on both axes: rows are the words that look, columns the words they may look at."""

from __future__ import annotations

import torch
from drawing import LIGHT, paper, write
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from regard import Causal, Padding, Prefix, Window, weights
from regard.ops.terms.masks import Mask

WORDS = ("The", "cat", "sat", "on", "the", "mat")
MASKS = {
    "Causal()": (Causal(), "each word sees itself and the past"),
    "Causal() | Prefix(3)": (Causal() | Prefix(3), "and the first three see each other"),
    "Causal() & Window(3)": (Causal() & Window(3), "itself and two words back"),
    "Padding((4,))": (Padding((4,)), "on the mat: padding, seen by no word"),
}
SEEN = "#7b2382"


def visible(mask: Mask) -> Tensor:
    """Whether the word of each row may look at that of each column."""
    nothing = torch.zeros(1, 1, len(WORDS), 1)
    return weights(nothing, nothing, mask=mask)[...][0, 0] > 0


def draw() -> Figure:
    """A square for each pair of words."""
    figure, axes = paper(5.2, 5.75)
    cell = 0.29
    for n, (name, (mask, means)) in enumerate(MASKS.items()):
        left, top = 0.55 + 2.55 * (n % 2), 0.85 + 2.88 * (n // 2)
        write(axes, left + 3 * cell, top - 0.68, name, family="monospace")
        for r, row in enumerate(visible(mask).tolist()):
            write(axes, left - 0.06, top + (r + 0.5) * cell, WORDS[r], ha="right", size=8.5)
            write(axes, left + (r + 0.5) * cell, top - 0.05, WORDS[r], va="bottom", rotation=60, size=8.5)
            for c, seen in enumerate(row):
                colours = {"facecolor": SEEN if seen else LIGHT, "edgecolor": "#9a9aa8", "linewidth": 0.5}
                axes.add_patch(Rectangle((left + c * cell, top + r * cell), cell, cell, **colours))
        write(axes, left + 3 * cell, top + 6 * cell + 0.14, means, size=8)
    return figure
