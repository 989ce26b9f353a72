"""A cache of keys and values that grows by one token a step, and one for a window, which does not."""

from __future__ import annotations

import torch
from drawing import KEY, QUERY, VALUE, arrow, box, paper, write
from matplotlib.figure import Figure

from regard import Causal, Window
from regard.nn import Attention

WORDS = ("The", "cat", "sat", "down", ".")
WIDTH = 3


def lengths(window: int | None) -> list[int]:
    """How many keys the cache holds after each token."""
    layer = Attention(8, 2, mask=Causal() if window is None else Causal() & Window(window)).eval()
    cache, found = layer.new_cache(), []
    with torch.no_grad():
        for _ in WORDS:
            layer(torch.zeros(1, 1, 8), cache=cache)
            found.append(cache.kept)
    return found


def draw() -> Figure:
    """A row for each step: the query of the new token, and the keys and values in the cache."""
    figure, axes = paper(5.2, 3.3)
    write(axes, 1.15, 0.18, "query")
    write(axes, 2.85, 0.18, "keys and values in the cache")
    write(axes, 4.82, 0.1, "kept with", size=8)
    write(axes, 4.82, 0.25, f"Window({WIDTH})", size=8)
    kept = lengths(WIDTH)
    for step, length in enumerate(lengths(None)):
        y = 0.45 + 0.52 * step
        write(axes, 0.42, y + 0.19, f"step {step + 1}")
        box(axes, 0.85, y, 0.6, 0.38, WORDS[step], QUERY)
        arrow(axes, (1.47, y + 0.19), (1.66, y + 0.19))
        for n in range(length):
            x = 1.7 + 0.53 * n
            box(axes, x, y, 0.48, 0.19, WORDS[n], KEY if n < length - 1 else QUERY)
            box(axes, x, y + 0.19, 0.48, 0.19, "", VALUE if n < length - 1 else QUERY)
        write(axes, 4.82, y + 0.19, f"{kept[step]} of {length}")
    write(axes, 2.6, 3.12, "pink: computed in this step; keys (above) and values (below) before it are read", size=8)
    return figure
