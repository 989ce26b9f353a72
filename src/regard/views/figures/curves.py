"""Curves of a training run: a panel for each metric, training and evaluation together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .canvas import ACCENT, DEEP, FAINT, HAIR, INK, add_title, footnote, paper, shorten

Curve = tuple[Sequence[int], Sequence[float]]  # steps and values

PANELS_ACROSS = 3
WIDTH, HEIGHT = 3.6, 2.5  # inches of a panel
UNPLOTTED = ("training/epoch", "evaluation/epoch")
LAST = ("rate", "norm")  # after the metrics, and before speeds
OWN = ("training", "evaluation")  # groups that share a panel if their names are the same


@dataclass(frozen=True)
class Line:
    """One curve of a panel, with its label."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class CurvePanel:
    """The curves of one metric."""

    name: str
    lines: Sequence[Line]


def curve_panels(curves: Mapping[str, Curve]) -> list[CurvePanel]:
    """Group curves by metric: metrics of evaluations first, then rates, norms and speeds, then the user's own.

    >>> [panel.name for panel in curve_panels({"training/rate": ([1], [0.1]), "training/loss": ([1], [2.0])})]
    ['loss', 'rate']

    The elements of a logged tensor, names that end in numbers, are lines of one panel.
    """
    groups: dict[str, list[Line]] = {}
    for name, (steps, values) in curves.items():
        if name in UNPLOTTED:
            continue
        group, _, metric = name.partition("/")
        parts = metric.split("/")
        while len(parts) > 1 and parts[-1].isdecimal():
            parts.pop()
        key = "/".join(parts if group in OWN else [group, *parts])
        index = metric.split("/")[len(parts) :]
        groups.setdefault(key, []).append(Line(", ".join(index) or group, steps, values))
    evaluated = {name.partition("/")[2] for name in curves if name.startswith("evaluation/")}
    return [CurvePanel(name, groups[name]) for name in sorted(groups, key=lambda name: _rank(name, evaluated))]


def curves(curves: Mapping[str, Curve], *, best: int | None = None, title: str = "") -> Figure:
    """Draw the curves of a run: steps and values by name, as `training/loss` or `evaluation/bleu`.

    >>> figure = curves({"training/loss": ([50, 100], [2.0, 1.5]), "evaluation/loss": ([100], [1.7])})
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['training', 'evaluation']

    `best` is the step of the best checkpoint.
    """
    panels = curve_panels(curves)
    if not panels:
        raise ValueError("curves need at least one metric, got none; train until the first row of the log")
    across = min(PANELS_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = paper(WIDTH * across, HEIGHT * down)
    places = figure.subplots(down, across, squeeze=False, sharex=True).flatten()
    for place, panel in zip(places, panels, strict=False):
        _draw(place, panel, best)
    for place in places[len(panels) :]:
        place.set_axis_off()
    if best is not None:
        footnote(figure, f"grey line: best checkpoint, step {best:,}")
    add_title(figure, title)
    return figure


def _draw(axes: Axes, panel: CurvePanel, best: int | None) -> None:
    if best is not None:
        axes.axvline(best, color=HAIR, linewidth=3)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(panel.lines)))
    for line, shade in zip(panel.lines, shades, strict=True):
        few = np.isfinite(line.values).sum() <= 1
        marker = "o" if few or line.label == "evaluation" else "none"
        colour = {"training": DEEP, "evaluation": ACCENT}.get(line.label, shade)
        axes.plot(line.steps, line.values, marker=marker, ms=3, color=colour, lw=1.2, label=line.label)
    (name,), families = shorten([panel.name])
    axes.set_title(name, fontsize=10, color=INK, loc="left", fontfamily=families, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set(color=HAIR)
    axes.tick_params(labelsize=8, colors=FAINT, length=2, labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set(fontsize=8, color=FAINT)
    axes.set_xlabel("step", fontsize=8, color=FAINT)
    if len({line.label for line in panel.lines} & set(OWN)) == 2:
        axes.legend([line for line in axes.lines if line.get_label() in OWN], OWN, fontsize=8, frameon=False)


def _rank(name: str, evaluated: set[str]) -> tuple[int, str]:
    """Return the place of a panel, as a key to sort by."""
    if name == "loss":
        return 0, name
    if name in evaluated:
        return 1, name
    if name in LAST:
        return 2 + LAST.index(name), name
    return (5 if "/" in name else 4), name
