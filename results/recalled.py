"""Where a model of `recall` looks in a text of 32,768 words: the map of every head, and the rows of some words.

    python -m results.recalled runs/full --attention full --out full.png

A pixel of a map is the largest weight of 128 queries and 128 keys. Below it are the weights of the last word, which
repeats the key and asks; `--words 0 -1` has those of the first word too. A mark shows where the key stands in the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard import Weights
from regard.lens import capture
from regard.train import find, load, own_device
from regard.views.figures.canvas import WHITE_TO_DARK

from .recall import ATTENTION, KEY, Recaller, texts

CELLS = 256  # a side of a map
PEAKS = 512  # of the weights of a row, as many as are drawn


@torch.no_grad()
def main() -> None:
    """Read one text, and draw what it was read with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--attention", choices=ATTENTION, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    parser.add_argument("--words", type=int, nargs="+", default=[-1], help="words whose rows are drawn")
    for name, value in (("length", 32_768), ("window", 512), ("seed", 10**6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    model = Recaller(given.attention, given.window).to(own_device()).eval()
    load(find(given.run), model)
    text = texts(given.length, 1, given.seed)
    with capture(model) as tape:
        said = int(model(text["ids"].to(own_device())).argmax())
    place = int((text["ids"][0] == KEY).nonzero()[0])
    print(f"the key is word {place:,} of {given.length:,}; the value is {int(text['value'])}, the model says {said}")
    layers = [A for name in tape.layers if isinstance(A := tape[name], Weights)]
    for number, A in enumerate(layers, 1):
        for word in given.words:
            for head, row in enumerate(A[0, :, word], 1):
                found = f"word {int(row.argmax()):,} by {float(row.max()):.3f}"
                print(f"layer {number}, head {head}: word {word % given.length:,} looks at {found}")
    draw(layers, given.words, place).savefig(given.out, dpi=110)


def draw(layers: Sequence[Weights], words: Sequence[int], place: int) -> Any:
    """A column a layer, and for each head its map above the rows of these words."""
    from matplotlib.figure import Figure

    heads, length = layers[0].shape[1], layers[0].shape[-1]
    strips = 1 + len(words)
    figure = Figure(figsize=(2.6 * len(layers), (2.4 + 0.9 * len(words)) * heads), layout="constrained")
    ratios = ([4] + [1] * len(words)) * heads
    grid = figure.subplots(strips * heads, len(layers), squeeze=False, sharex=True, height_ratios=ratios)
    for number, A in enumerate(layers):
        cells = min(CELLS, length)
        maps, rows = A.pool(cells, cells, "max")[0].sqrt().float().cpu(), A[0, :, list(words)].float().cpu()
        for head in range(heads):
            above, *below = grid[strips * head : strips * (head + 1), number]
            above.imshow(
                maps[head].numpy(), cmap=WHITE_TO_DARK, vmin=0, vmax=1, extent=(0, length, length, 0), aspect="auto"
            )
            above.set_title(f"layer {number + 1}, head {head + 1}", fontsize=9)
            above.set(yticks=[], xticks=[0, length], xticklabels=["first", "last"])
            for axes, word, row in zip(below, words, rows[head], strict=True):
                largest, at = (found.numpy() for found in row.topk(min(PEAKS, length)))
                axes.vlines(at, 0, largest, color="black", linewidth=0.8)
                axes.plot([place], [-0.15], marker="^", color="crimson", markersize=4, clip_on=False)
                axes.set(xlim=(-0.02 * length, 1.02 * length), ylim=(0, 1.05), yticks=[0, 1])
                axes.set_ylabel(f"word {word % length:,}", fontsize=7)
                axes.tick_params(labelsize=7)
    return figure


if __name__ == "__main__":
    main()
