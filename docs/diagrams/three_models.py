"""BERT, GPT and the encoder-decoder side by side: the same blocks, other masks."""

from __future__ import annotations

import torch
from drawing import KEY, LIGHT, OUTPUT, QUERY, arrow, box, paper, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from regard import capture
from regard.models import Bert, BertConfig, Gpt, GptConfig, Transformer, TransformerConfig

SIZES = {"dim": 8, "heads": 1, "hidden": 16, "dropout": 0.0, "attention_dropout": 0.0}
SEEN = "#7b2382"


def models() -> dict[str, nn.Module]:
    """The three models, small."""
    both = {"source_vocabulary": 9, "target_vocabulary": 9, "start": 1, "encoder_layers": 1, "decoder_layers": 1}
    return {
        "BERT": Bert(BertConfig(vocabulary=9, depth=1, **SIZES)).eval(),
        "GPT": Gpt(GptConfig(vocabulary=9, depth=1, **SIZES)).eval(),
        "Transformer": Transformer(TransformerConfig(**both, **SIZES)).eval(),
    }


def visible() -> dict[str, list[Tensor]]:
    """For each model and each of its attentions, which of five tokens may look at which."""
    ids, found = torch.tensor([[3, 4, 5, 6, 7]]), {}
    for name, model in models().items():
        with capture(model) as tape, torch.no_grad():
            model(*([ids, ids[:, :4]] if name == "Transformer" else [ids]))
        found[name] = [A[...][0, 0] > 0 for A in tape.values()]
    return found


def pattern(axes: Axes, x: float, y: float, seen: Tensor) -> None:
    """A small square for each pair."""
    for r, row in enumerate(seen.tolist()):
        for c, value in enumerate(row):
            colours = {"facecolor": SEEN if value else LIGHT, "edgecolor": "#9a9aa8", "linewidth": 0.4, "zorder": 4}
            axes.add_patch(Rectangle((x + 0.095 * c, y + 0.095 * r), 0.095, 0.095, **colours))


def block(axes: Axes, x: float, y: float, name: str, seen: Tensor, fill: str = QUERY) -> None:
    """An attention with its mask beside its name."""
    box(axes, x, y, 1.32, 0.6, "", fill)
    write(axes, x + 0.68, y + 0.3, name, color="#1d1d2b", ha="left", size=8)
    pattern(axes, x + 0.09, y + 0.3 - 0.0475 * len(seen), seen)


def draw() -> Figure:
    """Each model from the bottom up."""
    figure, axes = paper(5.95, 3.75)
    seen = visible()
    source, own, cross = seen["Transformer"]
    columns = (
        (0.05, "BERT", "self-\nattention", seen["BERT"][0], "hidden words", "text"),
        (1.5, "GPT", "masked\nself-att.", seen["GPT"][0], "next words", "text so far"),
        (3.05, "encoder", "self-\nattention", source, "", "source"),
    )
    for x, name, words, pairs, writes, reads in columns:
        middle = x + 0.66
        write(axes, middle, 0.2, name)
        if writes:
            write(axes, middle, 0.95, writes, size=8)
            arrow(axes, (middle, 1.37), (middle, 1.07))
        box(axes, x, 1.37, 1.32, 0.4, "feed-forward", OUTPUT)
        arrow(axes, (middle, 2.25), (middle, 1.79))
        block(axes, x, 2.25, words, pairs)
        arrow(axes, (middle, 3.4), (middle, 2.87))
        write(axes, middle, 3.52, reads, size=8)
    x, middle = 4.6, 5.26
    write(axes, middle, 0.2, "and decoder")
    write(axes, middle, 0.42, "next words", size=8)
    arrow(axes, (middle, 0.75), (middle, 0.53))
    box(axes, x, 0.75, 1.32, 0.34, "feed-forward", OUTPUT)
    arrow(axes, (middle, 1.37), (middle, 1.11))
    block(axes, x, 1.37, "cross-\nattention", cross, KEY)
    arrow(axes, (4.37, 1.57), (4.58, 1.62))
    arrow(axes, (middle, 2.25), (middle, 1.99))
    block(axes, x, 2.25, "masked\nself-att.", own)
    arrow(axes, (middle, 3.4), (middle, 2.87))
    write(axes, middle, 3.52, "target so far", size=8)
    return figure
