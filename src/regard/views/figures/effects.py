"""The effects of a sweep: a row for each layer, a column for each head or group of tokens."""

from __future__ import annotations

from matplotlib.figure import Figure

from ...lens.edits.sweep import Sweep
from .canvas import (
    Colours,
    add_title,
    label_columns,
    label_inches,
    label_rows,
    paper,
    shorten_layer_names,
)


def effects(sweep: Sweep, *, word: str = "", title: str = "") -> Figure:
    """Draw what each set of edits does to the metric: red raises it, blue lowers it.

    >>> import torch
    >>> from regard.lens import Sweep, knockouts
    >>> labels = tuple(knockouts({"layers.0": 2, "layers.1": 2}))
    >>> figure = effects(Sweep(1.0, labels, torch.tensor([1.5, 1.0, 0.25, 1.0])))
    >>> figure.axes[0].get_ylabel()
    'layer'

    `word` names the columns, "head" or "tokens" unless given. A sweep whose labels are no tuples has one column.
    """
    if not isinstance(sweep, Sweep):
        raise TypeError(
            f"effects draws a sweep, got {type(sweep).__name__}; write effects(sweep(model, inputs, edits, metric))"
        )
    rows, columns = sweep.axes()
    values = sweep.grid().float().numpy()
    i, j = values.shape
    layers = shorten_layer_names([str(row) for row in rows]).texts
    names = [str(column) for column in columns]
    high, wide = (min(max(0.24 * n, 2.0), 9.0) for n in values.shape)
    figure = paper(wide + label_inches(layers, i) + 1.6, high + label_inches(names, j) + 0.8)
    place = figure.add_subplot()
    colours = Colours([values], "linear")
    colours.paint(place, values, (i, j))
    label_rows(place, layers, i, i, "layer")
    default = "" if names == [""] else "head" if all(name.isdecimal() for name in names) else "tokens"
    label_columns(place, names if any(names) else None, j, j, word or default)
    add_title(figure, title)
    colours.bar(figure, [place], "change of the metric")
    return figure
