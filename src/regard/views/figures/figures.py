"""Figures of attention: each a matplotlib `Figure`, returned and never shown; `figure.savefig("map.png")` writes it.

Where a figure takes a matrix `A`, that is a `Weights` of one batch row and head, `A.select(batch=0, heads=3)`, or any
2-D tensor or array, queries by keys. Maps of more than 512 tokens a side are pooled, and their axes say so.
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
from ...lens.tape.tape import Tape
from ...ops.terms.masks.mask_algebra import Mask
from .canvas import (
    ACCENT,
    DEEP,
    INK,
    SIZE,
    Colours,
    Scale,
    check_labels,
    entitle,
    footnote,
    frame,
    ink_on,
    label_columns,
    label_rows,
    paper,
    placed,
    room,
    shortened,
    shortened_layers,
    widths,
)
from .figure_inputs import Matrix, Numbers, cells, entropy_and_distance, heads, numbers, received, row, shape
from .fonts import shown

CELLS = 512  # a side of a map
SMALL = 128  # a side of one map among many
TOKENS = 5000  # of a coloured text
PITCH, GAP, HEADED, BAR = 1.1, 0.1, 0.3, 0.9  # a grid: inches from map to map, between, above, and for the scale
PAGE, LINE = 7.5, 0.28  # a coloured text: inches across, inches a line
WIDEST = 48  # characters of one of its tokens: of the widest, as many fit a line
SIDE, BETWEEN = 1.6, 1.6  # a pair of sentences: inches of either at least, and between them


def heatmap(
    A: Matrix,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    scale: Scale = "linear",
    title: str = "",
) -> Figure:
    """The matrix as a picture, a row a query, with tokens on both axes.

    >>> import torch
    >>> figure = heatmap(torch.eye(3), ["the", "cat", "sat"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['the', 'cat', 'sat']

    `queries` are the keys too where there are as many of both. `scale="sqrt"` brings out small weights. An axis of
    more than 64 tokens counts them instead of naming them.
    """
    i, j = shape(A)
    keys = queries if keys is None and i == j else keys
    queries, keys = (
        None if x is None else check_labels(name, x, n) for name, x, n in (("queries", queries, i), ("keys", keys, j))
    )
    values = cells(A, CELLS)
    high, wide = (min(max(0.24 * n, 2.0), 7.0) for n in values.shape)
    figure = paper(wide + room(queries, i) + 1.6, high + room(keys, j) + 0.8)
    axes = figure.add_subplot()
    colours = Colours([values], scale)
    colours.paint(axes, values, (i, j))
    label_rows(axes, queries, i, values.shape[0])
    label_columns(axes, keys, j, values.shape[1])
    entitle(figure, title)
    colours.bar(figure, [axes])
    return figure


def grid(
    stack: Tape | Iterable[Matrix], *, layers: Sequence[str] | None = None, scale: Scale = "sqrt", title: str = ""
) -> Figure:
    """Every head of every layer: a row a layer, the first on top, a column a head, one scale for all.

    A layer is a `Weights` of one batch row, or a tensor or array of dims h i j; a tape names its layers.
    """
    stack, names = _named(stack, layers, "layer {}")
    found = [heads(layer, SMALL) for layer in stack]
    texts, families = shortened_layers(names)
    beside, down, across = max(widths(texts, families)), len(found), max(len(layer) for layer, _ in found)
    figure = paper(beside + max(PITCH * across, 3.0) + BAR, PITCH * down + HEADED, arranged=False)
    sizes = sorted({size for _, size in found})
    pooled = f", pooled to at most {SMALL} cells a side" if max(map(max, sizes)) > SMALL else ""
    counts = ", ".join(f"{i:,} x {j:,}" for i, j in sizes)
    footnote(figure, f"queries down, keys across: {counts}{pooled}")
    above = entitle(figure, title) + HEADED
    wide = (figure.get_figwidth() - beside - BAR) / across
    colours = Colours([layer for layer, _ in found], scale)
    entitled = 0
    for n, (layer, size) in enumerate(found):
        for head, values in enumerate(layer):
            axes = placed(figure, beside + wide * head, above + PITCH * n, wide - GAP, PITCH - GAP)
            colours.paint(axes, values, size)
            if head >= entitled:
                axes.set_title(f"head {head}", fontsize=9, color=INK)
            if head == 0:
                side: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center", "fontfamily": families}
                axes.set_ylabel(texts[n], fontsize=9, parse_math=False, **side)
        entitled = max(entitled, len(layer))
    scale_at = placed(figure, figure.get_figwidth() - BAR, above, 0.14, PITCH * down - GAP)
    colours.bar(figure, [], within=scale_at)
    return figure


def by_layer(stack: Tape | Iterable[Matrix], *, layers: Sequence[str] | None = None, title: str = "") -> Figure:
    """Entropy and mean distance layer by layer: a dot a head, a line through their means.

    Both are means over batch rows and queries. A layer is a `Weights`, or a tensor or array of dims h i j; a tape names
    its layers.
    """
    stack, names = _named(stack, layers, "{}")
    found = [entropy_and_distance(layer) for layer in stack]
    names, families = shortened_layers(names)
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
    entitle(figure, title)
    return figure


def text(
    A: Matrix, tokens: Sequence[str], *, query: int | None = None, scale: Scale = "sqrt", title: str = ""
) -> Figure:
    """The text, each token coloured by the attention it receives: from the mean query, or from one `query`.

    `tokens` are those of the keys, and of one too long for a line the beginning is written. Where the queries are the
    same tokens, the one that asks is framed.
    """
    i, j = shape(A)
    tokens = check_labels("tokens", tokens, j)
    if j > TOKENS:
        raise ValueError(f"a coloured text holds at most {TOKENS} tokens, got {j}; show a part, or use heatmap")
    values = received(A) if query is None else row(A, query)
    asking = query % i if query is not None and i == j else None
    texts, families = shortened(tokens, WIDEST)
    lines = _lines(texts, tokens, families)
    across = max(left + width for line in lines for _, left, width in line)
    figure = paper(across + 1.2, max(LINE * len(lines), 1.2) + 0.6)
    axes = figure.add_subplot()
    axes.set(xlim=(0, across), ylim=(len(lines), 0))
    axes.set_axis_off()
    colours = Colours([values], scale)
    for number, line in enumerate(lines):
        for n, left, width in line:
            colour = colours(values[n])
            edge = INK if n == asking else "none"
            axes.add_patch(Rectangle((left, number + 0.06), width, 0.88, facecolor=colour, edgecolor=edge))
            style: dict[str, Any] = {"fontsize": SIZE, "fontfamily": families, "parse_math": False}
            axes.text(left + width / 2, number + 0.5, texts[n], ha="center", va="center", color=ink_on(colour), **style)
    entitle(figure, title)
    colours.bar(figure, [axes], "received attention" if query is None else "given attention")
    return figure


def image(
    A: Matrix,
    picture: Tensor | npt.NDArray[Any],
    *,
    query: int = 0,
    patches: tuple[int, int] | None = None,
    title: str = "",
) -> Figure:
    """The picture in grey, coloured where one query looks: a ViT's class token, a decoder's step over a CNN's grid.

    Keys are patches row by row, `patches` (rows, columns) of them, a square unless given; keys before them, as a class
    token, are left out. The picture has dims y x, y x c or c y x.
    """
    given = _on_grid(row(A, query)[None], patches)
    figure = _panels(given, _pixels(picture), [""], plain=False)
    entitle(figure, title)
    return figure


def caption(
    A: Matrix, picture: Tensor | npt.NDArray[Any], words: Sequence[str], *, patches: tuple[int, int] | None = None
) -> Figure:
    """The picture, and again for each word of its caption, coloured where the word looked (as Xu et al. 2015, fig. 3).

    A has a row for each word. Pictures and patches as for `image`; one scale for all words.
    """
    i, j = shape(A)
    words = check_labels("words", words, i)
    given = _on_grid(cells(A, max(i, j)), patches)
    return _panels(given, _pixels(picture), words, plain=True)


def alignment(links: Links | Matrix, source: Sequence[str], target: Sequence[str], *, title: str = "") -> Figure:
    """A sentence pair, source on the left, its words joined by links: sure ones solid, merely possible ones dashed.

    A matrix of attention, target by source, draws every pair as dark as its weight. Of long words the beginning is
    written, and the figure is as wide as the words need.
    """
    source, target = check_labels("source", source, len(source)), check_labels("target", target, len(target))
    texts, families = shortened([*source, *target])
    rows = max(len(source), len(target), 1)
    inches = widths(texts, families)
    left, right = (max([SIDE, *some]) for some in (inches[: len(source)], inches[len(source) :]))
    across = left + BETWEEN + right
    figure = paper(across + 0.2, 0.26 * rows + 0.8)
    axes = figure.add_subplot()
    axes.set(xlim=(0, across), ylim=(rows - 0.5, -0.5))
    axes.set_axis_off()
    style: dict[str, Any] = {"va": "center", "fontsize": SIZE, "fontfamily": families, "parse_math": False}
    for n, word in enumerate(texts[: len(source)]):
        axes.text(left, n, word, ha="right", color=INK, **style)
    for n, word in enumerate(texts[len(source) :]):
        axes.text(left + BETWEEN, n, word, ha="left", color=INK, **style)
    for (s, t), line in _joined(links, len(source), len(target)):
        axes.add_line(Line2D([left + 0.1, left + BETWEEN - 0.1], [s, t], color=ACCENT, solid_capstyle="round", **line))
    entitle(figure, title)
    return figure


def mask(mask: Mask | Tensor | npt.NDArray[Any], rows: int | None = None, cols: int | None = None) -> Figure:
    """Who may look at whom: a dark cell where the query of the row sees the key of the column.

    `rows` and `cols` are how many queries and keys to draw, what the mask itself holds or 12 unless given.
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
                f"mask must be of booleans, True where a key is seen, got {mask.dtype}; "
                "for one that is added to scores write mask == 0"
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
    entitle(figure, repr(mask) if isinstance(mask, Mask) else "")
    return figure


def _named(stack: Tape | Iterable[Matrix], layers: Sequence[str] | None, unnamed: str) -> tuple[list[Any], list[str]]:
    """The layers and their names, which are counted before anything is measured."""
    if isinstance(stack, Tape) and layers is None:
        layers = shown_calls(stack)
    found = list(stack.values() if isinstance(stack, Tape) else stack)
    if not found:
        raise ValueError("the stack holds no layers; pass a list of Weights, the first layer first")
    names = [unnamed.format(n) for n in range(len(found))]
    return found, names if layers is None else check_labels("layers", layers, len(found))


def _lines(texts: Sequence[str], tokens: Sequence[str], families: list[str]) -> list[list[tuple[int, float, float]]]:
    """Tokens set in lines of `PAGE` inches: which token, where it begins, how wide it is. Line feeds break lines."""
    lines: list[list[tuple[int, float, float]]] = [[]]
    left = 0.0
    for n, width in enumerate(widths(texts, families)):
        if left + width > PAGE and lines[-1]:
            lines.append([])
            left = 0.0
        lines[-1].append((n, left, width))
        left += width + 0.03
        if tokens[n].endswith("\n"):
            lines.append([])
            left = 0.0
    return lines if lines[-1] or len(lines) == 1 else lines[:-1]


def _on_grid(given: Numbers, patches: tuple[int, int] | None) -> Numbers:
    """`queries keys -> queries y x`, keys before the patches left out."""
    n = given.shape[1]
    if patches is None:
        side = int(n**0.5)
        if n - side * side > 1:
            raise ValueError(f"{n} keys are no square of patches, nor one more; write patches=(rows, columns)")
        patches = side, side
    if not isinstance(patches, Sequence) or len(patches) != 2:
        raise TypeError(f"patches must be (rows, columns), got {patches!r}")
    y, x = patches
    for count in patches:
        check_int("patches", count, least=1)
    if y * x > n:
        raise ValueError(f"patches must be (rows, columns) of at most {n} keys in all, got {patches}")
    return given[:, n - y * x :].reshape(-1, y, x)


def _pixels(picture: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """y x or y x c, values from 0 to 1 or bytes."""
    if isinstance(picture, Tensor) and picture.is_floating_point():
        picture = numbers(picture)  # which takes what NumPy has no type for
    pixels = picture.detach().cpu().numpy() if isinstance(picture, Tensor) else np.asarray(picture)
    if np.iscomplexobj(pixels):
        raise TypeError(f"picture must hold real numbers, got {pixels.dtype}")
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if not pixels.size or (pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[-1] not in (3, 4))):
        raise ValueError(f"picture must have dims y x, y x c or c y x, c of 1, 3 or 4, got shape {pixels.shape}")
    if pixels.dtype == np.uint8:
        return pixels
    pixels = pixels.astype(np.float64)
    if pixels.min() < 0 or pixels.max() > 1:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low or 1.0)  # a normalized picture, brought back to where it can be seen
    return pixels


def _panels(given: Numbers, pixels: npt.NDArray[Any], titles: Sequence[str], *, plain: bool) -> Figure:
    """A panel for each map of attention over the picture, before them the picture as it is where that is asked."""
    count = len(given) + plain
    across = min(count, 5)
    down = -(-count // across)
    high, wide = pixels.shape[:2]
    side = 2.0 if count > 1 else 4.0
    figure = paper(side * across + 0.9, (min(side * high / wide, 2 * side) + 0.3) * down + 0.2)
    places = list(figure.subplots(down, across, squeeze=False).flat)
    colours = Colours([given], "linear", colormaps["plasma"])
    texts, families = shown(titles)
    grey = pixels if pixels.ndim == 2 else pixels[..., :3].mean(-1)
    extent = (0, wide, high, 0)
    for place in places:
        place.set_axis_off()
    if plain:
        places[0].imshow(pixels, cmap="gray", extent=extent)
    for place, values, title in zip(places[plain:], given, texts, strict=False):
        place.imshow(grey, cmap="gray", extent=extent)
        share = np.where(np.isfinite(values), np.abs(values) / colours.most, 1.0)
        veil = 0.75 * np.sqrt(share)  # what is not looked at shows through
        place.imshow(values, colours.map, colours.norm, alpha=veil, interpolation="nearest", extent=extent)
        place.set_title(title, fontsize=SIZE, fontfamily=families, color=INK, parse_math=False)
    colours.bar(figure, places)
    return figure


def _joined(links: Links | Matrix, n_s: int, n_t: int) -> Iterable[tuple[tuple[int, int], dict[str, Any]]]:
    """Links, and how to draw each."""
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
