"""Shared parts of the book's diagrams: boxes, arrows, matrices with their numbers, and the file that is written.

A unit is an inch of the drawing. Lines and words are in INK, which the page draws light on a dark background; words on
a coloured box are in DARK, which stays.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor

from regard.views.figures.canvas import WHITE_TO_DARK

INK, DARK, LIGHT = "#20202d", "#1d1d2b", "#ffffff"
QUERY, KEY, VALUE, PLAIN, OUTPUT = "#f3b6cf", "#ffd9a0", "#c9bdf0", "#dcdce4", "#bfe3cf"
STYLE = f"svg{{--ink:{INK}}}@media (prefers-color-scheme:dark){{svg{{--ink:#e6e6ee}}}}"
SIZE = 9


def paper(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty drawing of so many inches; x goes right and y goes down."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, *, color: str = INK, size: float = SIZE, **how: object) -> None:
    """Words, centred at a point unless `ha` or `va` says otherwise."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "color": color, "fontsize": size, "zorder": 5} | how)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", fill: str = PLAIN) -> None:
    """A coloured box with words in it; x and y are its upper left corner."""
    style = "round,pad=0,rounding_size=0.05"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=DARK, linewidth=0.6))
    if text:
        write(axes, x + width / 2, y + height / 2, text, color=DARK)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    width: float = 1.0,
    bend: float = 0.0,
    color: str = INK,
) -> None:
    """An arrow from a point to a point; `bend` curves it."""
    curve = f"arc3,rad={bend}"
    how = {"arrowstyle": "-|>", "mutation_scale": 7 + width, "shrinkA": 0, "shrinkB": 0, "linewidth": width}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=curve, color=color, zorder=3, **how))


def matrix(
    axes: Axes,
    x: float,
    y: float,
    values: Tensor,
    cell: float = 0.34,
    *,
    fill: str | None = None,
    numbers: str = "{:.2f}",
    most: float = 1.0,
    size: float = 7.5,
) -> None:
    """Cells with their numbers; without `fill` they have the colours of attention weights, where white is zero."""
    for r, row in enumerate(values.tolist()):
        for c, value in enumerate(row):
            colour = fill or WHITE_TO_DARK((max(value, 0.0) / most) ** 0.5)
            dark = fill is None and sum(colour[:3]) < 1.5
            place = (x + c * cell, y + r * cell)
            axes.add_patch(Rectangle(place, cell, cell, facecolor=colour, edgecolor="#9a9aa8", linewidth=0.5))
            text = numbers.format(value if abs(value) > 5e-3 else 0.0).replace("-inf", "-∞").replace("-", "−")
            middle = place[0] + cell / 2, place[1] + cell / 2
            write(axes, *middle, text, color=LIGHT if dark else DARK, size=size)


def save(figure: Figure, path: Path) -> None:
    """Write the drawing, the same bytes each time, its ink as a variable that a page can set."""
    with plt.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "path", "path.simplify": True}):
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = path.read_text(encoding="utf8").replace(INK, f"var(--ink, {INK})")
    head = text.index(">", text.index("<svg")) + 1
    path.write_text(f"{text[:head]}\n <style>{STYLE}</style>{text[head:]}", encoding="utf8")
