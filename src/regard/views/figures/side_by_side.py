"""Two models' attention over the same texts, map beside map, with one scale of colours."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from .canvas import (
    INK,
    Colours,
    Scale,
    add_title,
    label_columns,
    label_inches,
    label_rows,
    paper,
    shorten,
    token_labels,
)
from .figure_inputs import Matrix, cells, shape

MAX_CELLS = 128  # per side of a map


def side_by_side(
    maps: Sequence[tuple[Matrix, Matrix]],
    queries: Sequence[Sequence[str]],
    keys: Sequence[Sequence[str]],
    *,
    names: tuple[str, str],
    axes: tuple[str, str] = ("query", "key"),
    scale: Scale = "sqrt",
    title: str = "",
) -> Figure:
    """Draw a row for each example: the map of the first model and that of the second.

    >>> import torch
    >>> words = [["the", "cat"]]
    >>> figure = side_by_side([(torch.eye(2), torch.ones(2, 2))], words, words, names=("a", "b"))
    >>> [place.get_title() for place in figure.axes[:2]]
    ['a', 'b']

    `queries` and `keys` hold the tokens of each example, which both models share.
    """
    if not maps:
        raise ValueError("side_by_side needs at least one pair of maps, got none")
    sizes = [shape(a) for a, _ in maps]
    for n, (a, b) in enumerate(maps):
        if shape(a) != shape(b):
            raise ValueError(
                f"both maps of an example must have one shape, got {shape(a)} and {shape(b)} for number {n}"
            )
    rows = [token_labels("queries", words, i) for words, (i, _) in zip(queries, sizes, strict=True)]
    columns = [token_labels("keys", words, j) for words, (_, j) in zip(keys, sizes, strict=True)]
    heights = [
        min(max(0.24 * i, 1.2), 6.0) + label_inches(words, j) + 0.5
        for (i, j), words in zip(sizes, columns, strict=True)
    ]
    wide = max(min(max(0.24 * j, 1.6), 6.0) + label_inches(words, i) for (i, j), words in zip(sizes, rows, strict=True))
    figure = paper(2 * wide + 1.4, sum(heights))
    places = figure.subplots(len(maps), 2, squeeze=False, height_ratios=heights)
    values = [[cells(one, MAX_CELLS) for one in pair] for pair in maps]
    colours = Colours([one for pair in values for one in pair], scale)
    texts, families = shorten(names)
    for n, (i, j) in enumerate(sizes):
        for place, drawn in zip(places[n], values[n], strict=True):
            colours.paint(place, drawn, (i, j))
            label_rows(place, rows[n], i, drawn.shape[0], axes[0])
            label_columns(place, columns[n], j, drawn.shape[1], axes[1])
    for place, name in zip(places[0], texts, strict=True):
        place.set_title(name, fontsize=10, color=INK, fontfamily=families, parse_math=False)
    add_title(figure, title)
    colours.bar(figure, places.flatten().tolist())
    return figure
