"""Where a model of `recall` looks in a text of 32,768 words: the map of every head, and the row of the word that asks.

    python -m results.recalled runs/full --attention full --out full.png

Above, a map of each head, a pixel the largest weight of 128 queries and 128 keys; below, the weights of the last word,
which repeats the key. A mark shows where the key stands in the text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import Weights
from regard.lens import capture
from regard.train import find, load, own_device

from .recall import ATTENTION, KEY, Recaller, texts

CELLS = 256  # a side of a map


@torch.no_grad()
def main() -> None:
    """Read one text, and draw what it was read with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attention", choices=ATTENTION, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("length", 32_768), ("window", 512), ("seed", 10**6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    model = Recaller(given.attention, given.window).to(own_device()).eval()
    load(find(given.run), model)
    text = texts(given.length, 1, given.seed)
    with capture(model) as tape:
        said = int(model(text["ids"].to(own_device())).argmax())
    place = int((text["ids"][0] == KEY).nonzero()[0])
    print(f"the key is at {place:,} of {given.length:,}; said {said}, the value is {int(text['value'])}")
    draw([tape[layer] for layer in tape.layers], place).savefig(given.out, dpi=150)


def draw(layers: list[Weights], place: int) -> Any:
    """A column a layer, and for each head its map above the row of the last query."""
    from matplotlib.figure import Figure

    heads, length = layers[0].shape[1], layers[0].shape[-1]
    figure = Figure(figsize=(2.6 * len(layers), 3.4 * heads), layout="constrained")
    grid = figure.subplots(2 * heads, len(layers), squeeze=False, sharex=True, height_ratios=[3, 1] * heads)
    for column, A in enumerate(layers):
        cells = min(CELLS, length)
        maps, rows = A.pool(cells, cells, "max")[0].float().cpu(), A[0, :, -1].float().cpu()
        for head in range(heads):
            above, below = grid[2 * head, column], grid[2 * head + 1, column]
            above.imshow(maps[head].sqrt(), cmap="magma", vmin=0, vmax=1, extent=(0, length, length, 0), aspect="auto")
            above.set_title(f"layer {column + 1}, head {head + 1}", fontsize=9)
            above.set_yticks([])
            below.vlines(*peaks(rows[head]), color="black", linewidth=0.8)
            below.plot([place], [-0.12], marker="^", color="crimson", markersize=5, clip_on=False)
            below.set(xlim=(0, length), ylim=(0, 1), yticks=[0, 1])
    for below in grid[-1]:
        below.set_xticks([0, length], ["first", "last"])
    return figure


def peaks(row: Tensor, few: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """The largest weights of a row: where they are, and from where to where a line for each goes."""
    largest, at = row.topk(min(few, len(row)))
    return at, torch.zeros_like(largest), largest


if __name__ == "__main__":
    main()
