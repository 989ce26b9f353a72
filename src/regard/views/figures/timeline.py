"""The heads of a model over training steps: a heat map for each measure, layers stacked, events marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...lens.monitoring.head_history import HeadEvent, HeadHistory
from .canvas import ACCENT, DEEP, FAINT, HAIR, INK, Colours, add_title, footnote, paper, shorten_layer_names

WIDTH = 7.0  # inches
HEAD_INCHES, MIN_PANEL_INCHES, MAX_PANEL_INCHES = 0.09, 1.1, 6.0
FOOT_INCHES = 0.35
MAX_LABELS = 24  # layers that are named
LABELS = {
    "logit": "largest logit (0 or less: white)",
    "entropy": "mean entropy (nats)",
    "sink": "attention to sinks",
    "received": "attention to one key",
    "max": "mean largest weight",
    "distance": "mean distance",
}
PANEL_OF = {"collapse": "entropy", "sink": "sink"}  # kind of event -> the measure in whose panel it is marked
MARKS = {"logit": "^", "clipped": "v", "collapse": "o", "sink": "s", "dead": "X"}
OTHER_MARK = "D"


class WithHistory(Protocol):
    """A monitor."""

    @property
    def history(self) -> HeadHistory: ...


def timeline(
    history: HeadHistory | WithHistory | str | Path, *, measures: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Draw the numbers of every head over training steps, with the events that were found.

    >>> import torch
    >>> from regard.lens import HeadHistory
    >>> history = HeadHistory(("logit", "entropy"))
    >>> for step in (1, 51, 101):
    ...     history.add(step, {"layers.0": {"logit": torch.rand(4) * step, "entropy": torch.rand(4)}})
    >>> [axes.get_title("left") for axes in timeline(history).axes[:2]]
    ['largest logit (0 or less: white)', 'mean entropy (nats)']

    Each row is a head, the heads of a layer together and the first layer on top; each column is a watched step.
    `history` is a `HeadHistory`, a `Monitor`, or the folder that one wrote to. `measures` are the panels to draw.
    """
    history = as_history(history)
    chosen = history.measures if measures is None else tuple(measures)
    if not len(history):
        raise ValueError("the history has no step yet; watch at least one, with monitor: ...")
    values = {name: stack_heads(history, name) for name in chosen}
    rows = next(iter(values.values())).shape[0]
    panel = min(max(MIN_PANEL_INCHES, HEAD_INCHES * rows), MAX_PANEL_INCHES)
    figure = paper(WIDTH, (panel + 0.35) * len(chosen) + 0.3)
    places = figure.subplots(len(chosen), 1, squeeze=False, sharex=True).flatten()
    kinds: dict[str, str] = {}
    for place, name in zip(places, chosen, strict=True):
        _draw(figure, place, history, name, values[name])
        kinds |= _mark(place, history, [event for event in history.events if panel_of_event(event, chosen) == name])
    places[-1].set_xlabel("step", fontsize=9, color=INK)
    if kinds:
        footnote(figure, "events: " + ", ".join(f"{mark} {kind}" for kind, mark in kinds.items()))
        share = FOOT_INCHES / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))  # type: ignore[union-attr, call-arg]
    figure.provenance = f"heads over steps {history.steps[0]} to {history.steps[-1]}"
    add_title(figure, title)
    return figure


def as_history(history: HeadHistory | WithHistory | str | Path) -> HeadHistory:
    """Return the history of a monitor or of a folder."""
    if isinstance(history, HeadHistory):
        return history
    return HeadHistory.load(history) if isinstance(history, str | Path) else history.history


def stack_heads(history: HeadHistory, measure: str) -> np.ndarray:
    """Return a measure of all heads over steps, `layers-times-heads steps`."""
    return torch.cat(list(history[measure].values()), 1).T.double().numpy()


def _draw(figure: Figure, axes: Axes, history: HeadHistory, name: str, values: np.ndarray) -> None:
    values, rows = np.where(np.isinf(values), np.nan, values), len(values)
    if name == "logit":
        values = np.maximum(values, 0)
    colours = Colours([values], "linear")
    colours.paint(axes, values, (rows, len(history)))
    colours.bar(figure, [axes], "")
    axes.set_title(LABELS.get(name, name), fontsize=10, color=INK, loc="left", parse_math=False)
    heads = [history.heads(layer) for layer in history.layers]
    ends = np.cumsum(heads)
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color=HAIR, linewidth=0.8)
    texts, families = shorten_layer_names(history.layers)
    every = -(-len(heads) // MAX_LABELS)
    middles = ends - np.array(heads) / 2 - 0.5
    axes.set_yticks(middles[::every], texts[::every], fontfamily=families, fontsize=8, parse_math=False)
    axes.set_ylabel("layer", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=FAINT, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    steps = history.steps
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda n, _: f"{steps[int(n)]:,}" if n == int(n) and 0 <= n < len(steps) else "")
    )


def panel_of_event(event: HeadEvent, chosen: Sequence[str]) -> str:
    """Return the measure in whose panel an event is marked; the first one if its own is not drawn."""
    wanted = PANEL_OF.get(event.kind, "logit")
    return wanted if wanted in chosen else chosen[0]


def _mark(axes: Axes, history: HeadHistory, events: Sequence[HeadEvent]) -> dict[str, str]:
    """Mark events at their step and head; return the marks by kind."""
    first = dict(zip(history.layers, np.cumsum([0, *map(history.heads, history.layers)]), strict=False))
    found = {}
    for event in events:
        if event.layer not in first or event.step not in history.steps:
            continue
        x, mark = history.steps.index(event.step), MARKS.get(event.kind, OTHER_MARK)
        middle = (history.heads(event.layer) - 1) / 2 if event.head is None else event.head
        colour = ACCENT if event.kind == "clipped" else DEEP
        axes.plot(x, first[event.layer] + middle, mark, ms=4, mfc="white", mec=colour, mew=1, clip_on=False)
        found[event.kind] = SYMBOLS[mark]
    return found


SYMBOLS = {"^": "▲", "v": "▼", "o": "●", "s": "■", "X": "✖", "D": "◆"}
