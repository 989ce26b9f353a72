"""Figures of attention: each a matplotlib `Figure`, returned and never shown; `figure.savefig("map.png")` writes it.

A matrix `A` is a `Weights` of one batch row and head, `A.select(batch=0, heads=3)`, or any 2-D tensor or array, queries
by keys. Maps of more than 512 tokens a side are pooled, and their axes say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from torch import Tensor

from ...checks import check_int
from ...lens.analysis.alignment import Links
from ...lens.layer_names import shown_calls
from ...lens.recording.edge_weights import EdgeWeights
from ...lens.tape.tape import Tape
from ...ops.terms.masks.mask_algebra import Mask
from .canvas import (
    ACCENT,
    DEEP,
    INK,
    TEXT_POINTS,
    Colours,
    Paper,
    Scale,
    add_axes,
    add_title,
    check_labels,
    footnote,
    frame,
    ink_on,
    label_columns,
    label_inches,
    label_rows,
    paper,
    shorten,
    shorten_layer_names,
    sign,
    token_labels,
    widths,
)
from .figure_inputs import (
    Matrix,
    Numbers,
    cells,
    entropy_and_distance,
    heads,
    mean_received,
    numbers,
    row,
    shape,
    to_pixels,
)
from .fonts import drawable
from .token_marks import ReadableToken, readable

MAX_CELLS = 512  # per side of a map
MAX_SMALL_CELLS = 128  # per side of a map in a grid
MAX_TEXT_TOKENS = 5000
PITCH, GAP, HEADED, BAR = 1.1, 0.1, 0.3, 0.9  # inches: from map to map, between maps, above them, for the scale
PAGE, LINE, SPACE = 7.5, 0.28, 0.05  # inches: width of a coloured text, height of a line, gap between words
MAX_PANELS_ACROSS, PANEL_BAR, MIN_PANEL_PIXELS = 5, 1.7, 128  # inches for the scale; pixels a side of a panel
PANEL_QUANTILE = 0.98  # share of the weights over a picture that are below the end of the scale
MAX_DRAWN_NODES = 64  # sources or targets of a graph whose edges are drawn as lines
MAX_TEXT_TOKEN_CHARACTERS = 48  # a line holds this many of the widest characters
SIDE, BETWEEN = 1.6, 1.6  # inches: least width of a sentence, and the gap between the pair


def heatmap(
    A: Matrix,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    axes: tuple[str, str] = ("query", "key"),
    scale: Scale = "sqrt",
    title: str = "",
) -> Figure:
    """Draw the matrix as a heatmap, a row per query, with tokens on both axes.

    >>> import torch
    >>> figure = heatmap(torch.eye(3), ["the", "cat", "sat"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['the', 'cat', 'sat']

    Without `keys`, `queries` name both axes if the matrix is square. Colours are on a square-root scale, which brings
    out small weights; the legend says so, and `scale="linear"` is proportional. An axis of more than 64 tokens has
    numbers instead of tokens. The marks of tokenizers, such as Ġ and ##, are left out of labels. `axes` are the words
    beside the axes: `("written", "read")` for a translation.
    """
    if len(axes) != 2 or isinstance(axes, str):
        raise ValueError(f"axes must be two words, for queries and for keys, got {axes!r}")
    i, j = shape(A)
    keys = queries if keys is None and i == j else keys
    queries, keys = (
        None if x is None else token_labels(name, x, n) for name, x, n in (("queries", queries, i), ("keys", keys, j))
    )
    values = cells(A, MAX_CELLS)
    high, wide = (min(max(0.24 * n, 2.0), 7.0) for n in values.shape)
    figure = paper(wide + label_inches(queries, i) + 1.6, high + label_inches(keys, j) + 0.8)
    place = figure.add_subplot()
    colours = Colours([values], scale)
    colours.paint(place, values, (i, j))
    label_rows(place, queries, i, values.shape[0], axes[0])
    label_columns(place, keys, j, values.shape[1], axes[1])
    add_title(figure, title)
    colours.bar(figure, [place])
    sign(figure, A)
    return figure


def grid(
    stack: Tape | Iterable[Matrix], *, layers: Sequence[str] | None = None, scale: Scale = "sqrt", title: str = ""
) -> Figure:
    """Draw every head of every layer: a row per layer, the first on top, a column per head, one scale for all.

    A layer is a `Weights` of one batch row, or a tensor or array of dims h i j; a tape names its layers.
    """
    source = stack
    stack, names = _with_names(stack, layers, "layer {}")
    found = [heads(layer, MAX_SMALL_CELLS) for layer in stack]
    texts, families = shorten_layer_names(names)
    beside, down, across = max(widths(texts, families)), len(found), max(len(layer) for layer, _ in found)
    figure = paper(beside + max(PITCH * across, 3.0) + BAR, PITCH * down + HEADED, arranged=False)
    sizes = sorted({size for _, size in found})
    pooled = f", pooled to at most {MAX_SMALL_CELLS} cells a side" if max(map(max, sizes)) > MAX_SMALL_CELLS else ""
    counts = ", ".join(f"{i:,} x {j:,}" for i, j in sizes)
    footnote(figure, f"queries down, keys across: {counts}{pooled}")
    above = add_title(figure, title) + HEADED
    wide = (figure.get_figwidth() - beside - BAR) / across
    colours = Colours([layer for layer, _ in found], scale)
    entitled = 0
    for n, (layer, size) in enumerate(found):
        for head, values in enumerate(layer):
            axes = add_axes(figure, beside + wide * head, above + PITCH * n, wide - GAP, PITCH - GAP)
            colours.paint(axes, values, size)
            if head >= entitled:
                axes.set_title(f"head {head}", fontsize=9, color=INK)
            if head == 0:
                side: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center", "fontfamily": families}
                axes.set_ylabel(texts[n], fontsize=9, parse_math=False, **side)
        entitled = max(entitled, len(layer))
    scale_at = add_axes(figure, figure.get_figwidth() - BAR, above, 0.14, PITCH * down - GAP)
    colours.bar(figure, [], within=scale_at)
    sign(figure, source)
    return figure


def by_layer(stack: Tape | Iterable[Matrix], *, layers: Sequence[str] | None = None, title: str = "") -> Figure:
    """Plot entropy and mean distance by layer: a dot per head, a line through their means.

    Both are means over batch rows and queries. A layer is a `Weights`, or a tensor or array of dims h i j; a tape names
    its layers.
    """
    source = stack
    stack, names = _with_names(stack, layers, "{}")
    found = [entropy_and_distance(layer) for layer in stack]
    names, families = shorten_layer_names(names)
    turned = 90 if max(map(len, names)) > 3 else 0
    figure = paper(max(5.0, 0.35 * len(found) + 2.5), 4.4 + (max(widths(names, families)) if turned else 0.4))
    panels = figure.subplots(2, 1, sharex=True)
    for n, (panel, label) in enumerate(zip(panels, ("entropy, nats", "distance, tokens"), strict=True)):
        for at, measures in enumerate(found):
            panel.plot([at] * len(measures[n]), measures[n], "o", color=ACCENT, markersize=4, alpha=0.6, mew=0)
        panel.plot([float(measures[n].mean()) for measures in found], color=INK, linewidth=1.2)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    ticks = range(0, len(names), -(-len(names) // 48))
    labels = [names[n] for n in ticks]
    panels[1].set_xticks(ticks, labels, rotation=turned, fontfamily=families, parse_math=False)
    panels[1].set_xlabel("layer (a dot is a head, the line their mean)")
    add_title(figure, title)
    sign(figure, source)
    return figure


def text(
    A: Matrix, tokens: Sequence[str], *, query: int | None = None, scale: Scale = "sqrt", title: str = ""
) -> Figure:
    """Draw the text, each token coloured by the attention it receives: from the mean query, or from one `query`.

    `tokens` are the keys; tokens too long for a line are shortened. If the queries are the same tokens, `query` is
    framed.
    """
    i, j = shape(A)
    read = readable(check_labels("tokens", tokens, j))
    if j > MAX_TEXT_TOKENS:
        raise ValueError(
            f"a coloured text holds at most {MAX_TEXT_TOKENS} tokens, got {j}; draw a part of it, or use heatmap"
        )
    values = mean_received(A) if query is None else row(A, query)
    asking = query % i if query is not None and i == j else None
    texts, families = shorten([token.text for token in read], MAX_TEXT_TOKEN_CHARACTERS)
    lines = _lines(texts, read, families)
    across = max(left + width for line in lines for _, left, width in line)
    figure = paper(across + 1.4, max(LINE * len(lines), 1.5) + 0.6)
    axes = figure.add_subplot()
    axes.set(xlim=(0, across), ylim=(len(lines), 0))
    axes.set_axis_off()
    colours = Colours([values], scale)
    for number, line in enumerate(lines):
        for n, left, width in line:
            colour = colours(values[n])
            edge = INK if n == asking else "none"
            axes.add_patch(Rectangle((left, number + 0.06), width, 0.88, facecolor=colour, edgecolor=edge))
            style: dict[str, Any] = {"fontsize": TEXT_POINTS, "fontfamily": families, "parse_math": False}
            axes.text(left + width / 2, number + 0.5, texts[n], ha="center", va="center", color=ink_on(colour), **style)
    add_title(figure, title)
    colours.bar(figure, [axes], "received attention" if query is None else "given attention")
    sign(figure, A)
    return figure


def image(
    A: Matrix,
    picture: Tensor | npt.NDArray[Any],
    *,
    query: int = 0,
    patches: tuple[int, int] | None = None,
    title: str = "",
) -> Figure:
    """Draw a picture, and again in grey under the weights of one query, such as a ViT's class token or a decoder step.

    The legend shows each weight over dark and over light parts of the picture. If few patches have far more weight than
    all others, the scale ends below them and says "or more".

    Keys are patches in row-major order, `patches=(rows, columns)`, by default a square; keys before them, such as a
    class token, are left out. The picture has dims y x, y x c or c y x.
    """
    given = _on_grid(row(A, query)[None], patches)
    figure = _panels(given, to_pixels(picture), [""], title)
    sign(figure, A)
    return figure


def caption(
    A: Matrix, picture: Tensor | npt.NDArray[Any], words: Sequence[str], *, patches: tuple[int, int] | None = None
) -> Figure:
    """Draw the picture, and again for each word of its caption coloured by the word's weights (Xu et al. 2015, fig. 3).

    A has a row for each word. `picture` and `patches` are as for `image`; all words share one scale.
    """
    i, j = shape(A)
    words = token_labels("words", words, i)
    given = _on_grid(cells(A, max(i, j)), patches)
    figure = _panels(given, to_pixels(picture), words)
    sign(figure, A)
    return figure


def alignment(links: Links | Matrix, source: Sequence[str], target: Sequence[str], *, title: str = "") -> Figure:
    """Draw a sentence pair, source on the left, with links between its words: sure ones solid, possible ones dashed.

    With a matrix of attention, target by source, every pair is drawn as dark as its weight. Long words are shortened,
    and the figure is as wide as the words need.
    """
    source, target = token_labels("source", source, len(source)), token_labels("target", target, len(target))
    texts, families = shorten([*source, *target])
    rows = max(len(source), len(target), 1)
    inches = widths(texts, families)
    left, right = (max([SIDE, *some]) for some in (inches[: len(source)], inches[len(source) :]))
    across = left + BETWEEN + right
    figure = paper(across + 0.2, 0.26 * rows + 0.8)
    axes = figure.add_subplot()
    axes.set(xlim=(0, across), ylim=(rows - 0.5, -0.5))
    axes.set_axis_off()
    style: dict[str, Any] = {"va": "center", "fontsize": TEXT_POINTS, "fontfamily": families, "parse_math": False}
    for n, word in enumerate(texts[: len(source)]):
        axes.text(left, n, word, ha="right", color=INK, **style)
    for n, word in enumerate(texts[len(source) :]):
        axes.text(left + BETWEEN, n, word, ha="left", color=INK, **style)
    for (s, t), line in _styled_links(links, len(source), len(target)):
        axes.add_line(Line2D([left + 0.1, left + BETWEEN - 0.1], [s, t], color=ACCENT, solid_capstyle="round", **line))
    add_title(figure, title)
    sign(figure, links)
    return figure


def edges(
    A: EdgeWeights,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    *,
    head: int = 0,
    title: str = "",
) -> Figure:
    """Draw one head of attention over a graph: sources on the left, targets on the right, lines as dark as weights.

    >>> import torch
    >>> A = EdgeWeights(torch.tensor([[1, 2], [0, 0]]), torch.tensor([[0.25], [0.75]]), nodes=3)
    >>> len(edges(A, ["a", "b", "c"]).axes[0].lines)
    2

    Nodes without names have numbers. `sources` name the targets too if the nodes are of one kind. A graph of more than
    64 sources or targets is drawn as a heatmap.
    """
    if not isinstance(A, EdgeWeights):
        raise TypeError(f"A must be the EdgeWeights of a layer, got {type(A).__name__}; heatmap(A) draws other weights")
    *_, i, j = A.shape
    targets = sources if targets is None and i == j else targets
    weights = EdgeWeights(A.edge_index, A.weights[:, [head]], A.nodes).dense()[0]
    if max(i, j) > MAX_DRAWN_NODES:
        return heatmap(weights, targets, sources, scale="sqrt", title=title)
    left, right = (
        list(map(str, range(n))) if names is None else check_labels(kind, names, n)
        for kind, names, n in (("sources", sources, j), ("targets", targets, i))
    )
    return alignment(weights, left, right, title=title)


def mask(mask: Mask | Tensor | npt.NDArray[Any], rows: int | None = None, cols: int | None = None) -> Figure:
    """Draw a mask: a dark cell where the query of the row may attend to the key of the column.

    `rows` and `cols` are the numbers of queries and keys to draw, by default those of the mask, or 12 if it has none.
    """
    for name, count in (("rows", rows), ("cols", cols)):
        if count is not None:
            check_int(name, count, least=1)
    if isinstance(mask, Mask):
        seen = np.array([[cell == "■" for cell in line.split()] for line in mask.draw(rows, cols).splitlines()])
    else:
        shape(mask)
        if "float" in str(mask.dtype):
            raise ValueError(
                f"mask must be boolean, True where a key is visible, got {mask.dtype}; "
                "for an additive mask write mask == 0"
            )
        seen = numbers(mask)[:rows, :cols] > 0
    i, j = shape(seen)
    high, wide = (min(max(0.24 * n, 1.6), 7.0) for n in (i, j))
    figure = paper(wide + 0.8, high + 0.9)
    axes = figure.add_subplot()
    pair = ListedColormap(["#f3f1ee", DEEP])
    axes.imshow(seen, cmap=pair, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    if max(i, j) <= 64:
        axes.set_xticks(np.arange(j + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(i + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", length=0)
    label_rows(axes, None, i, i)
    label_columns(axes, None, j, j)
    frame(axes)
    add_title(figure, repr(mask) if isinstance(mask, Mask) else "")
    return figure


def _with_names(
    stack: Tape | Iterable[Matrix], layers: Sequence[str] | None, unnamed: str
) -> tuple[list[Any], list[str]]:
    """Return the layers and their names; a wrong number of names raises before anything is computed."""
    if isinstance(stack, Tape) and layers is None:
        layers = shown_calls(stack)
    found = list(stack.values() if isinstance(stack, Tape) else stack)
    if not found:
        raise ValueError("the stack holds no layers; pass a list of Weights, the first layer first")
    names = [unnamed.format(n) for n in range(len(found))]
    return found, names if layers is None else check_labels("layers", layers, len(found))


def _lines(
    texts: Sequence[str], tokens: Sequence[ReadableToken], families: list[str]
) -> list[list[tuple[int, float, float]]]:
    """Lay out tokens in lines of `PAGE` inches: token number, left edge and width. Line feeds break lines."""
    lines: list[list[tuple[int, float, float]]] = [[]]
    left = 0.0
    for n, width in enumerate(widths(texts, families)):
        left += SPACE if tokens[n].gap and lines[-1] else 0.0
        if left + width > PAGE and lines[-1]:
            lines.append([])
            left = 0.0
        lines[-1].append((n, left, width))
        left += width
        if tokens[n].text.endswith("\n"):
            lines.append([])
            left = 0.0
    return lines if lines[-1] or len(lines) == 1 else lines[:-1]


def _on_grid(given: Numbers, patches: tuple[int, int] | None) -> Numbers:
    """Reshape `queries keys -> queries y x`, without the keys before the patches."""
    n = given.shape[1]
    if patches is None:
        side = int(n**0.5)
        if n - side * side > 1:
            raise ValueError(
                f"{n} keys are not a square of patches, with or without a class token; pass patches=(rows, columns)"
            )
        patches = side, side
    if not isinstance(patches, Sequence) or len(patches) != 2:
        raise TypeError(f"patches must be (rows, columns), got {patches!r}")
    y, x = patches
    for count in patches:
        check_int("patches", count, least=1)
    if y * x > n:
        raise ValueError(f"patches must be (rows, columns) with at most {n} patches in all, got {patches}")
    return given[:, n - y * x :].reshape(-1, y, x)


def _panels(given: Numbers, pixels: npt.NDArray[Any], titles: Sequence[str], title: str = "") -> Paper:
    """Draw the picture, and a panel for each map of attention over it, in rows of nearly the same number of panels."""
    count = len(given) + 1
    down = -(-count // MAX_PANELS_ACROSS)
    across = -(-count // down)
    high, wide = pixels.shape[:2]
    side = 2.0 if count > 2 else 2.6
    tall = min((side - GAP) * high / wide, 2 * side)
    figure = paper(side * across + PANEL_BAR, (tall + HEADED) * down + 0.3, arranged=False)
    above = add_title(figure, title) + 0.1
    colours = Colours([given], "linear", colormaps["plasma"], quantile=PANEL_QUANTILE)
    texts, families = drawable(["", *titles])
    extent = (0, wide, high, 0)
    pixels = pixels / 255 if pixels.dtype == np.uint8 else pixels
    shades = pixels if pixels.ndim == 2 else pixels[..., :3].mean(-1)
    shown = [pixels, *(colours.over(*_at_one_resolution(shades, values)) for values in given)]
    for n, (drawn, text) in enumerate(zip(shown, texts, strict=True)):
        left, top = side * (n % across) + GAP, above + (tall + HEADED) * (n // across) + HEADED - GAP
        axes = add_axes(figure, left, top, side - GAP, tall)
        axes.imshow(drawn, cmap="gray", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        axes.set_title(text, fontsize=TEXT_POINTS, fontfamily=families, color=INK, parse_math=False)
        axes.set_axis_off()
    colours.bar_over_grey(add_axes(figure, side * across + 2 * GAP, above + HEADED - GAP, 0.3, tall))
    return figure


def _at_one_resolution(shades: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Return picture and map in pixels of the same size; cells of the map have equal numbers of them."""
    sizes = [cells * -(-max(n, MIN_PANEL_PIXELS) // cells) for n, cells in zip(shades.shape, values.shape, strict=True)]
    shades, values = (
        x[np.ix_(*(np.arange(size) * n // size for size, n in zip(sizes, x.shape, strict=True)))]
        for x in (shades, values)
    )
    return shades, values


def _styled_links(links: Links | Matrix, n_s: int, n_t: int) -> Iterable[tuple[tuple[int, int], dict[str, Any]]]:
    """Return the links, each with the style of its line."""
    if isinstance(links, Links):
        if outside := [link for link in links.possible if link[0] >= n_s or link[1] >= n_t]:
            raise ValueError(f"links must be among {n_s} source and {n_t} target words, got {sorted(outside)}")
        kinds = {True: {"linestyle": "-", "linewidth": 1.6}, False: {"linestyle": (0, (2, 2)), "linewidth": 1.2}}
        return [(link, kinds[link in links.sure]) for link in sorted(links.possible)]
    if shape(links) != (n_t, n_s):
        raise ValueError(f"weights must have dims target source, ({n_t}, {n_s}), got {shape(links)}")
    values = cells(links, max(n_s, n_t))
    most = max(values[np.isfinite(values)], default=0.0)
    strength = {(s, t): float(values[t, s]) / (most if most > 0 else 1.0) for t in range(n_t) for s in range(n_s)}
    return [(link, {"linewidth": 1.8, "alpha": min(x, 1.0)}) for link, x in strength.items() if x > 0.02]
