"""Parts of figures: an empty figure, colours with a shared scale, axes with tokens or numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import takewhile
from os import PathLike
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, FuncNorm, ListedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import regard

from ...ops.weights import Weights
from .figure_inputs import Numbers
from .fonts import DrawableText, drawable
from .token_marks import readable

Scale = Literal["linear", "sqrt"]

INK, FAINT, HAIR = "#222222", "#777777", "#cccccc"
ACCENT, DEEP = "#b73779", "#3b0f70"  # two colours of magma
NAN_COLOUR = "#9fb4c0"
PLURALS = {"query": "queries", "key": "keys"}
MAX_BEYOND_SCALE = 8  # the largest value is at most this number of times the end of the scale
MOSTLY_LETTERS = 0.8  # share of the labels of an axis
MAX_NAMED_TOKENS = 64  # along an axis; with more, tokens are numbered
TEXT_POINTS, TITLE_POINTS = 10, 11  # font sizes
VECTOR_FORMATS = {"svg", "svgz", "pdf", "eps", "ps"}
MAX_SOURCE = 100  # characters
MAX_TOKEN_CHARACTERS, MAX_LAYER_CHARACTERS = 24, 48
PART_OF_ESCAPE = re.compile(r"\\(u[0-9a-f]{0,3}|U[0-9a-f]{0,7})?$")  # at the end of a shortened text


def _from_white() -> ListedColormap:
    """Return magma reversed and starting at white, so that zero weights are invisible."""
    magma = np.asarray(colormaps["magma_r"](np.linspace(0, 1, 256)))
    share = np.minimum(np.linspace(0, 1, 256) / 0.2, 1)[:, None]
    return ListedColormap(1 - share * (1 - magma), name="magma_from_white")


WHITE_TO_DARK = _from_white()


class Paper(Figure):
    """A figure outside of pyplot: it has no window and no global state, and notebooks display it.

    Vector files are cropped to their contents, and end with one line that names the source of the picture.
    """

    provenance = ""

    def set_layout_engine(self, layout: Any = None, **options: Any) -> None:
        """Set what arranges the figure; None is nothing, whatever the user's style.

        matplotlib passes None when it has saved a figure that nothing arranges.
        """
        super().set_layout_engine("none" if layout is None else layout, **options)

    def savefig(self, fname: Any, **options: Any) -> None:
        """Write the figure to a file; the options are those of matplotlib."""
        suffix = Path(fname).suffix[1:] if isinstance(fname, str | PathLike) else ""
        if str(options.get("format") or suffix).lower() not in VECTOR_FORMATS:
            return super().savefig(fname, **options)
        at = 1 / 72 / self.get_figheight()  # a point below the figure; the crop takes it in
        signature = f"{self.provenance} · regard {regard.__version__}" if self.provenance else ""
        note = self.text(0.5, -at, signature, fontsize=6, color=FAINT, ha="center", va="top", parse_math=False)
        try:
            cropped: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.04}
            super().savefig(fname, **(cropped | options))
        finally:
            note.remove()

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def paper(width: float, height: float, *, arranged: bool = True) -> Paper:
    """Return an empty figure, in inches; `arranged=False` turns automatic layout off, for `add_axes`."""
    layout: Any = "constrained" if arranged else "none"  # None is the layout of the user's style
    figure = Paper(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def sign(figure: Paper, source: object) -> None:
    """Note the source of a figure: a matrix, or a tape with the class of its model."""
    facts = getattr(source, "facts", {})
    shape = " x ".join(map(str, getattr(source, "shape", ())))
    named = repr(source) if isinstance(source, Weights) else f"{type(source).__name__}({shape})"
    figure.provenance = f"capture of {facts['model']}" if "model" in facts else shorten([named], MAX_SOURCE).texts[0]


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes without ticks, placed in inches from the left and the top."""
    wide, high = figure.get_size_inches()
    corner = left / wide, 1 - (top + height) / high
    return figure.add_axes((*corner, width / wide, height / high), xticks=[], yticks=[])


def add_title(figure: Figure, title: object) -> float:
    """Add a title, wrapped to the width; return the inches by which the figure has grown."""
    if title is None or title == "":
        return 0.0
    lines, families = _wrap(str(title), figure.get_figwidth() - 0.2, TITLE_POINTS)
    taken = 0.1 + 0.018 * TITLE_POINTS * len(lines)
    figure.set_figheight(figure.get_figheight() + taken)
    top = {} if figure.get_layout_engine() else {"y": 1 - 0.08 / figure.get_figheight()}
    figure.suptitle("\n".join(lines), fontsize=TITLE_POINTS, color=INK, fontfamily=families, parse_math=False, **top)
    return taken


def footnote(figure: Figure, text: str) -> None:
    """Add wrapped text at the bottom; the figure grows by its lines."""
    wide = figure.get_figwidth()
    lines, _ = _wrap(text, wide - 0.2, 9)
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.16 * len(lines))
    inches = figure.dpi_scale_trans
    figure.text(wide / 2, 0.08, "\n".join(lines), fontsize=9, color=FAINT, ha="center", va="bottom", transform=inches)


def widths(texts: Sequence[str], families: list[str], size: float = TEXT_POINTS) -> list[float]:
    """Return the width of each text in inches, with a little padding."""
    scratch = paper(1, 1)
    renderer = scratch.canvas.get_renderer()  # type: ignore[attr-defined]
    found = []
    for written in texts:
        word = scratch.text(0, 0, written, fontsize=size, fontfamily=families, parse_math=False)
        found.append(word.get_window_extent(renderer).width / scratch.dpi + 0.08)
        word.remove()
    return found


def _wrap(text: str, inches: float, size: float) -> DrawableText:
    """Wrap a text to lines of at most `inches`."""
    (text,), families = drawable([text])
    letters = len(text)
    lines = [text]
    while letters > 1 and (longest := max(widths(lines, families, size))) > inches:
        letters = min(letters - 1, int(max(map(len, lines)) * inches / longest))
        lines = wrap(text, max(letters, 1))
    return DrawableText(lines, families)


class Colours:
    """Map values to colours: from 0 to the largest, or symmetric around 0 if any value is negative.

    With a `quantile` below 1 the scale ends there if single values are far larger; the legend then says "or more".
    """

    def __init__(
        self,
        values: Sequence[Numbers],
        scale: Scale,
        above_zero: Colormap = WHITE_TO_DARK,
        *,
        quantile: float = 1.0,
    ) -> None:
        if scale not in ("linear", "sqrt"):
            raise ValueError(f"scale must be 'linear' or 'sqrt', got {scale!r}")
        finite = [x[np.isfinite(x)] for x in values]
        least = min((float(x.min(initial=0.0)) for x in finite), default=0.0)
        most = max((float(x.max(initial=0.0)) for x in finite), default=0.0)
        self.some_missing = any(bool(np.isnan(x).any()) for x in values)
        largest = max(most, -least) or 1.0
        self.most = most = _top(finite, quantile, largest)
        self.exceeds = most < largest
        self.map: Colormap = (above_zero if least >= 0 else colormaps["RdBu_r"]).with_extremes(bad=NAN_COLOUR)
        self.scale = scale
        if scale == "linear":
            self.norm: Normalize = Normalize(-most if least < 0 else 0, most)
        else:
            self.norm = PowerNorm(0.5, 0, most) if least >= 0 else FuncNorm((_root, _square), -most, most)

    def __call__(self, value: float) -> tuple[float, float, float, float]:
        return self.map(float(self.norm(value)))

    def paint(self, axes: Axes, values: Numbers, shape: tuple[int, int]) -> None:
        """Draw the cells of a matrix of that shape, the first query on top, in token coordinates."""
        i, j = shape
        extent = (-0.5, j - 0.5, i - 0.5, -0.5)
        axes.imshow(values, cmap=self.map, norm=self.norm, aspect="auto", interpolation="nearest", extent=extent)
        frame(axes)

    def legend(self, label: str) -> str:
        """Return the label of the colour bar, with its scale."""
        asides = ["square-root scale"] * (self.scale == "sqrt") + ["grey: not a number"] * self.some_missing
        return f"{label}\n({', '.join(asides)})" if asides else label

    def over(self, grey: Numbers, values: Numbers) -> Numbers:
        """Return the colours of values laid over a grey picture, `y x 3`: it shows through where values are small."""
        share = np.where(np.isfinite(values), np.minimum(np.abs(values) / self.most, 1), 1.0)
        veil = 0.75 * np.sqrt(share)[..., None]
        colours = self.map(self.norm(np.ma.masked_invalid(values)))[..., :3]
        return (1 - veil) * grey[..., None] + veil * colours

    def bar_over_grey(self, axes: Axes) -> None:
        """Draw the legend of `over`: each value from bottom to top, over dark to light parts of the picture."""
        low, high = float(self.norm.vmin or 0.0), self.most
        grey, values = np.meshgrid(np.linspace(0, 1, 64), np.linspace(low, high, 256))
        axes.imshow(self.over(grey, values), extent=(0, 1, low, high), origin="lower", aspect="auto")
        axes.yaxis.tick_right()
        axes.yaxis.set_label_position("right")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(labelsize=8, length=2)
        axes.set_xticks([0, 1], ["dark", "light"], fontsize=7)
        axes.tick_params(axis="x", length=0)
        if self.exceeds:
            ticks = [x for x in MaxNLocator(4).tick_values(low, high) if low <= x < high - (high - low) / 12]
            axes.set_yticks([*ticks, high], [*(f"{x:.3g}" for x in ticks), f"{high:.2g} or more"])
        axes.set_ylabel(self.legend("attention"), color=INK)
        axes.spines[:].set_visible(False)

    def bar(self, figure: Figure, axes: Sequence[Axes], label: str = "attention", within: Axes | None = None) -> None:
        """Add the colour bar beside the axes, or within axes of its own."""
        colours = ScalarMappable(self.norm, self.map)
        bar = figure.colorbar(colours, ax=axes, cax=within, fraction=0.04, pad=0.02, aspect=30)
        bar.set_label(self.legend(label), color=INK)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, length=2)


def _top(values: Sequence[Numbers], quantile: float, largest: float) -> float:
    """Return the end of the scale: the quantile of sizes, if single values are more than 1.5 times as large."""
    if quantile == 1 or not sum(x.size for x in values):
        return largest
    high = float(np.quantile(np.abs(np.concatenate(values)), quantile, method="lower"))
    return max(high, largest / MAX_BEYOND_SCALE) if largest > 1.5 * high else largest


def _root(x: Numbers) -> Numbers:
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Numbers) -> Numbers:
    return np.sign(x) * np.square(x)


def ink_on(colour: tuple[float, float, float, float]) -> str:
    """Return black or white, whichever has more contrast."""
    red, green, blue, _ = colour
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def label_inches(tokens: Sequence[str] | None, n: int) -> float:
    """Return the inches that the labels along an axis of n tokens need."""
    if tokens is None or n > MAX_NAMED_TOKENS:
        return 0.4
    return max([0.4, *(0.2 + 0.08 * len(text) for text in shorten(tokens).texts)])


def label_rows(axes: Axes, tokens: Sequence[str] | None, n: int, drawn: int, word: str = "query") -> None:
    """Label the queries down the side with tokens, or with numbers if there are too many."""
    _label(axes.yaxis, word, tokens, n, drawn)


def label_columns(axes: Axes, tokens: Sequence[str] | None, n: int, drawn: int, word: str = "key") -> None:
    """Label the keys along the top with tokens or numbers.

    Labels are upright if they would run into each other; among letters only the labels that are longer are.
    """
    _label(axes.xaxis, word, tokens, n, drawn)
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    if tokens is None or n > MAX_NAMED_TOKENS or drawn < n:
        return
    shown = axes.get_xticklabels()
    lengths = [len(label.get_text()) for label in shown]
    are_letters = sum(length == 1 for length in lengths) >= MOSTLY_LETTERS * n
    for label, length in zip(shown, lengths, strict=True):
        label.set_rotation(90 if (length if are_letters else max(lengths)) > 2 else 0)


def _label(axis: Axis, word: str, tokens: Sequence[str] | None, n: int, drawn: int) -> None:
    if drawn < n:
        axis.set_label_text(f"{n:,} {PLURALS.get(word, word)}, pooled to {drawn} cells")
        return
    axis.set_label_text(word)
    axis.set_major_locator(MaxNLocator("auto", integer=True))
    if tokens is not None and n <= MAX_NAMED_TOKENS:
        texts, families = shorten(tokens)
        axis.set_ticks(range(n), texts, fontfamily=families, fontsize=9, parse_math=False)
        axis.set_tick_params(length=0)


def shorten(tokens: Sequence[str], longest: int = MAX_TOKEN_CHARACTERS) -> DrawableText:
    """Return drawable tokens; long ones are cut and end in an ellipsis."""
    texts, families = drawable([*tokens, "…"])
    texts = [x if len(x) <= longest else PART_OF_ESCAPE.sub("", x[: longest - 1]) + "…" for x in texts[:-1]]
    return DrawableText(texts, families)


def shorten_layer_names(names: Sequence[str]) -> DrawableText:
    """Return drawable names of layers, without the parts that all names share, as the viewer writes them."""
    if len(names) > 1:
        parts = [name.split(".") for name in names]
        most = min(map(len, parts)) - 1
        head = _common_prefix(part[:most] for part in parts)
        tail = _common_prefix(part[:head:-1] for part in parts)
        names = [".".join(part[head : len(part) - tail]) for part in parts]
    return shorten(names, MAX_LAYER_CHARACTERS)


def _common_prefix(lists: Iterable[list[str]]) -> int:
    """Return the length of the common prefix."""
    return len(list(takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))))


def frame(axes: Axes) -> None:
    """Draw a hairline around a map."""
    axes.spines[:].set(color=HAIR, linewidth=0.8)


def token_labels(name: str, tokens: Sequence[str], n: int) -> list[str]:
    """Return n tokens as a reader would write them."""
    return [token.text for token in readable(check_labels(name, tokens, n))]


def check_labels(name: str, texts: Sequence[str], n: int) -> list[str]:
    """Return the labels as a list; raises unless they are n strings."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a list of strings, got {type(texts).__name__}")
    if len(texts) != n:
        raise ValueError(f"{name} must hold {n} strings, got {len(texts)}")
    return list(texts)
