"""One block of a Transformer with its layer normalization before the sublayers, and behind the additions."""

from __future__ import annotations

from drawing import KEY, OUTPUT, PLAIN, QUERY, arrow, box, paper, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn, zeros

from regard.nn import Attention, EncoderBlock, FeedForward, PostNorm, PreNorm


def order(residual: type[nn.Module]) -> list[str]:
    """The parts of a block in the order in which they run."""
    block, ran = EncoderBlock(Attention(8, 2), FeedForward(8, 16), residual=residual), []
    kinds = {nn.LayerNorm: "norm", Attention: "attention", FeedForward: "feed-forward"}
    for module in block.modules():
        if type(module) in kinds:
            module.register_forward_hook(lambda module, args, out: ran.append(kinds[type(module)]))
    block(zeros(1, 3, 8))
    return ran


def column(axes: Axes, x: float, title: str, parts: list[str]) -> None:
    """The stream from the bottom up, with a way around each sublayer."""
    fills = {"norm": KEY, "attention": QUERY, "feed-forward": OUTPUT, "+": PLAIN}
    write(axes, x, 0.2, title)
    y = 3.75
    write(axes, x, y + 0.12, "$x$")
    start = y
    for part in parts:
        y -= 0.5
        arrow(axes, (x, y + 0.5), (x, y + 0.32))
        if part == "+":
            box(axes, x - 0.15, y, 0.3, 0.3, "+", PLAIN)
            axes.plot([x, x + 0.85, x + 0.85, x + 0.3], [start - 0.06, start - 0.06, y + 0.15, y + 0.15], **LINE)
            arrow(axes, (x + 0.3, y + 0.15), (x + 0.16, y + 0.15))
            start = y
        else:
            box(axes, x - 0.55, y, 1.1, 0.3, {"norm": "layer norm"}.get(part, part), fills[part])
            if part == "norm" and parts[0] != "norm":
                start = y
    arrow(axes, (x, y), (x, y - 0.2))


LINE = {"color": "#20202d", "linewidth": 1.0, "solid_capstyle": "butt"}


def with_additions(parts: list[str]) -> list[str]:
    """The same with a plus behind each sublayer."""
    return [step for part in parts for step in ([part] if part == "norm" else [part, "+"])]


def draw() -> Figure:
    """Pre-norm on the left, post-norm on the right."""
    figure, axes = paper(5.2, 4.0)
    column(axes, 1.2, "pre-norm: x + f(norm(x))", with_additions(order(PreNorm)))
    column(axes, 3.7, "post-norm: norm(x + f(x))", with_additions(order(PostNorm)))
    return figure
