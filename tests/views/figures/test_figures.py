"""Figures by their structure: labels, extents, values and colours, never pixels."""

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from regard import Causal, Global, Window, weights
from regard.lens import EdgeWeights, capture
from regard.lens.analysis.alignment import Links
from regard.nn import Attention
from regard.views import alignment, by_layer, caption, edges, grid, heatmap, image, mask, text
from regard.views.figures.canvas import ink_on

WORDS = ["the", "cat", "sat", "on", "it"]
close = np.testing.assert_allclose


def one_head(n=5, **terms):
    q, k = torch.randn(2, 1, 1, n, 8)
    return weights(q, k, **terms)


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def shown_values(axes):
    return np.asarray(axes.images[0].get_array())


def written(figure):
    """Every text of a figure in one line, after drawing it without a warning."""
    FigureCanvasAgg(figure).draw()
    found = [*figure.texts, *(t for axes in figure.axes for t in (*axes.texts, axes.title))]
    return [t.get_text().replace("\n", " ") for t in found if t.get_text()]


def test_heatmap_shows_the_matrix_with_tokens_on_both_axes():
    A = one_head(mask=Causal())
    figure = heatmap(A, WORDS, title="layer 3, $head$ 0")
    axes = figure.axes[0]
    assert isinstance(figure, Figure)
    close(shown_values(axes), A.dense()[0, 0], atol=1e-6)
    assert labels(axes.yaxis) == labels(axes.xaxis) == WORDS
    assert axes.images[0].get_extent() == [-0.5, 4.5, 4.5, -0.5]
    assert axes.images[0].norm.vmin == 0
    assert axes.images[0].norm.vmax == pytest.approx(float(A.max().max()))
    assert "layer 3, $head$ 0" in written(figure)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_any_plain_matrix_will_do(kind):
    values = kind([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    figure = heatmap(values, ["a", "b"], ["x", "y", "z"], scale="sqrt")
    axes = figure.axes[0]
    close(shown_values(axes), values)
    assert labels(axes.yaxis) == ["a", "b"]
    assert labels(axes.xaxis) == ["x", "y", "z"]
    assert axes.images[0].norm(0.25) == pytest.approx(0.5)
    written(figure)


def test_a_notebook_shows_a_figure_as_it_is():
    assert heatmap(np.eye(2))._repr_png_().startswith(b"\x89PNG")


def test_names_of_keys_stand_upright_where_they_would_run_into_each_other():
    for words, rotation in ((["a", "bc"], 0), (["a", "bcd"], 90)):
        assert {label.get_rotation() for label in heatmap(np.eye(2), words).axes[0].get_xticklabels()} == {rotation}


def test_values_below_zero_are_coloured_symmetrically_around_it():
    figure = heatmap(np.array([[-2.0, 1.0]]))
    norm = figure.axes[0].images[0].norm
    assert (norm.vmin, norm.vmax) == (-2, 2)
    assert norm(np.array([-2.0, -0.5, 0.0, 0.5, 2.0])).tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    linear = heatmap(np.array([[-2.0, 1.0]]), scale="linear").axes[0].images[0].norm
    assert linear(np.array([-1.0, 1.0])).tolist() == [0.25, 0.75]


def test_heatmaps_are_on_a_square_root_scale_and_say_so():
    found, linear = heatmap(np.array([[0.0, 0.25, 1.0]])), heatmap(np.array([[0.0, 0.25, 1.0]]), scale="linear")
    assert [float(figure.axes[0].images[0].norm(0.25)) for figure in (found, linear)] == [0.5, 0.25]
    assert [figure.axes[1].get_ylabel() for figure in (found, linear)] == [
        "attention\n(square-root scale)",
        "attention",
    ]


def test_axes_of_a_heatmap_have_the_words_of_the_reader():
    axes = heatmap(np.eye(3), axes=("written", "read")).axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("written", "read")
    axes = heatmap(np.eye(600), axes=("written", "read")).axes[0]
    assert axes.get_ylabel() == "600 written, pooled to 512 cells"
    with pytest.raises(ValueError, match="axes must be two words, for queries and for keys, got 'ab'"):
        heatmap(np.eye(3), axes="ab")


def test_marks_of_tokenizers_are_left_out_of_every_label():
    tokens, clean = ["Ġthe", "ĠcafÃ©", "s"], ["the", "café", "s"]
    axes = heatmap(np.eye(3), tokens).axes[0]
    assert labels(axes.yaxis) == labels(axes.xaxis) == clean
    assert [t.get_text() for t in text(np.eye(3), tokens).axes[0].texts] == clean
    assert [
        axes.get_title() for axes in caption(np.eye(3), np.zeros((3, 3)), tokens, patches=(1, 3)).axes[1:4]
    ] == clean
    pair = alignment(np.eye(3), tokens, ["▁le", "▁café", "s"])
    assert [t.get_text() for t in pair.axes[0].texts] == [*clean, "le", "café", "s"]


def test_letters_stand_and_the_long_labels_among_them_lie():
    letters = [*"2024年", "<end>"]
    shown = heatmap(np.eye(6), letters).axes[0].get_xticklabels()
    assert [label.get_rotation() for label in shown] == [0] * 5 + [90]


def test_nothing_is_drawn_where_nothing_is_and_darkness_grows_with_attention():
    colours = heatmap(np.eye(3)).axes[0].images[0].cmap(np.linspace(0, 1, 64))
    assert tuple(colours[0]) == (1, 1, 1, 1)
    lightness = colours[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) < 0).all()


@pytest.mark.parametrize("kind", ["weights", "tensor"])
def test_long_inputs_are_pooled_to_512_cells_and_the_axes_say_so(kind):
    A = one_head(1300, mask=Causal() & Window(200))
    figure = heatmap(A if kind == "weights" else A.dense()[0, 0])
    axes = figure.axes[0]
    close(shown_values(axes), A.pool(512, 512)[0, 0], atol=1e-6)
    assert axes.get_ylabel() == "1,300 queries, pooled to 512 cells"
    assert axes.get_xlabel() == "1,300 keys, pooled to 512 cells"
    assert axes.images[0].get_extent() == [-0.5, 1299.5, 1299.5, -0.5]
    written(figure)


def test_an_axis_of_many_tokens_counts_them():
    figure = heatmap(np.eye(65), [f"t{n}" for n in range(65)])
    written(figure)
    assert "t0" not in labels(figure.axes[0].yaxis)
    assert labels(heatmap(np.eye(64), [f"t{n}" for n in range(64)]).axes[0].yaxis)[63] == "t63"


def test_grid_has_a_map_for_each_layer_and_head_on_one_scale():
    q, k = torch.randn(2, 3, 1, 4, 7, 8)
    stack = [weights(q[n], k[n], mask=Causal()) for n in range(3)]
    for given in (stack, [A.dense()[0] for A in stack]):
        figure = grid(given, layers=["encoder.0", "encoder.1", "上"], title="all")
        maps = [axes for axes in figure.axes if axes.images]
        assert len(maps) == 12
        for n, axes in enumerate(maps):
            close(shown_values(axes), stack[n // 4].dense()[0, n % 4], atol=1e-6)
        assert len({(axes.images[0].norm.vmin, axes.images[0].norm.vmax) for axes in maps}) == 1
        assert [axes.get_title() for axes in maps[:4]] == [f"head {n}" for n in range(4)]
        assert maps[4].get_ylabel() == "encoder.1"
        assert any("7 x 7" in line for line in written(figure))


def test_grid_leaves_room_where_layers_have_fewer_heads_and_says_when_it_pools():
    figure = grid([np.ones((3, 150, 4)) / 4, np.ones((1, 9, 4)) / 4])
    assert sum(bool(axes.images) for axes in figure.axes) == 4
    assert any("pooled to at most 128 cells" in line for line in written(figure))


def test_by_layer_shows_entropy_and_distance_of_each_head():
    q, k = torch.randn(2, 3, 2, 4, 9, 8)
    stack = [weights(q[n], k[n], mask=Causal()) for n in range(3)]
    figure = by_layer(stack)
    written(figure)
    for panel, measure in zip(figure.axes, ("entropy", "distance"), strict=True):
        expected = [getattr(A, measure)().mean((0, 2)) for A in stack]
        *dots, line = panel.lines
        for n, heads in enumerate(expected):
            close(dots[n].get_ydata(), heads, atol=1e-5)
            assert list(dots[n].get_xdata()) == [n] * 4
        close(line.get_ydata(), [heads.mean() for heads in expected], atol=1e-5)
    dense = by_layer([A.select(batch=0).dense()[0] for A in stack])
    one = by_layer([A.select(batch=0) for A in stack])
    for ours, theirs in zip(dense.axes, one.axes, strict=True):
        close(ours.lines[-1].get_ydata(), theirs.lines[-1].get_ydata(), atol=1e-5)


def test_a_tape_is_drawn_with_the_names_of_its_layers():
    model = nn.ModuleList([Attention(8, heads=2), Attention(8, heads=2)])
    with torch.no_grad(), capture(model) as tape:
        x = model[1](model[0](torch.randn(1, 5, 8)))
    panels = [axes for axes in grid(tape).axes if axes.images]
    assert [axes.get_ylabel() for axes in panels] == ["0", "", "1", ""]
    close(shown_values(panels[3]), tape["1"].dense()[0, 1], atol=1e-6)
    assert [axes.get_ylabel() for axes in grid(tape, layers=["a", "b"]).axes if axes.images] == ["a", "", "b", ""]
    with torch.no_grad(), capture(model[0]) as tape:
        model[0](x)
        model[0](x)
    figure = by_layer(tape)
    assert labels(figure.axes[1].xaxis) == ["(model), 0", "(model), 1"]


@pytest.mark.thorough
@pytest.mark.parametrize("query", [None, 3, -1])
def test_text_is_coloured_by_what_each_token_receives(query):
    A = one_head(mask=Causal())
    dense = A.dense()[0, 0].numpy()
    expected = dense.mean(0) if query is None else dense[query]
    for given in (A, dense):
        figure = text(given, WORDS, query=query, scale="linear")
        axes = figure.axes[0]
        assert [t.get_text() for t in axes.texts] == WORDS
        for box, word, value in zip(axes.patches, axes.texts, expected, strict=True):
            colour = heatmap(np.eye(2)).axes[0].images[0].cmap(value / expected.max())
            close(box.get_facecolor(), colour, atol=0.02)
            assert word.get_color() == ink_on(box.get_facecolor())
        framed = [n for n, box in enumerate(axes.patches) if box.get_edgecolor()[3] > 0]
        assert framed == ([] if query is None else [query % 5])
        written(figure)


def test_text_runs_in_lines_that_do_not_overlap_and_breaks_at_line_feeds():
    words = ["word"] * 60 + ["end\n", "next"]
    figure = text(np.ones((2, 62)) / 62, words)
    axes = figure.axes[0]
    boxes = [(box.get_y(), box.get_x(), box.get_x() + box.get_width()) for box in axes.patches]
    for before, after in itertools.pairwise(boxes):
        assert after[0] > before[0] or after[1] >= before[2]
    assert boxes[-1][1] == 0
    assert axes.texts[60].get_text() == "end\\n"
    assert max(right for _, _, right in boxes) <= 7.5


@pytest.mark.parametrize("letter", ["x", "W", "上", "\x1b"])
def test_a_token_as_wide_as_the_page_is_shortened(letter):
    figure = text(np.ones((2, 5)) / 5, ["a", "b", letter * 130, "c", "x" * 40])
    assert figure.get_figwidth() < 9
    assert [t.get_text()[-1] for t in figure.axes[0].texts] == ["a", "b", "…", "c", "x"]
    assert figure.axes[0].texts[-1].get_text() == "x" * 40
    written(figure)


def blend(grey, values, most):
    """The colours of weights over a grey picture, by the definition of the veil."""
    colours = colormaps["plasma"](np.minimum(values / most, 1))[..., :3]
    veil = 0.75 * np.sqrt(np.minimum(values / most, 1))[..., None]
    return (1 - veil) * grey[..., None] + veil * colours


@pytest.mark.parametrize("keys", [12, 13])
def test_image_shows_the_picture_and_then_the_attention_of_a_query_over_its_patches(keys):
    values = torch.rand(4, keys)
    picture = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    figure = image(values, picture, query=2, patches=(3, 4), title="class token")
    plain, over = [axes.images[0] for axes in figure.axes[:2]]
    close(plain.get_array(), picture / 255)
    assert plain.get_extent() == over.get_extent() == [0, 40, 30, 0]
    shown, given = np.asarray(over.get_array()), values[2, keys - 12 :].view(3, 4).numpy()
    assert shown.shape == (129, 128, 3)
    rows, cols = np.arange(129) * 30 // 129, np.arange(128) * 40 // 128
    grey = (picture / 255).mean(-1)[np.ix_(rows, cols)]
    spread = given.repeat(43, 0).repeat(32, 1)
    most = np.sort(given.ravel())[-2] if given.max() > 1.5 * np.sort(given.ravel())[-2] else given.max()
    close(shown, blend(grey, spread, most), atol=1e-6)
    assert written(figure) == ["class token"]


def test_patches_are_square_unless_given_and_pictures_come_in_any_layout():
    values = np.arange(10.0)[None]
    for picture in (torch.rand(3, 6, 8), torch.randn(1, 6, 8), np.zeros((6, 8)), np.zeros((6, 8, 4))):
        over = image(values, picture).axes[1].images[0]
        assert over.get_array().shape == (129, 129, 3)
        assert over.get_extent() == [0, 8, 6, 0]


def test_every_colour_over_a_picture_is_in_the_legend():
    figure = image(np.random.default_rng(0).random((1, 36)), np.random.default_rng(1).random((50, 50)))
    over, legend = (np.asarray(figure.axes[n].images[0].get_array()).reshape(-1, 3) for n in (1, 2))
    nearest = np.array([np.abs(legend - colour).sum(1).min() for colour in over[::37]])
    assert nearest.max() < 0.03
    assert figure.axes[2].get_ylabel() == "attention"
    assert [label.get_text() for label in figure.axes[2].get_xticklabels()] == ["dark", "light"]


def test_one_patch_does_not_black_out_the_others():
    values = np.linspace(0.01, 0.02, 36)
    even = image(values[None], np.zeros((6, 6)))
    values[7] = 0.9
    figure = image(values[None], np.zeros((6, 6)))
    legend = figure.axes[2]
    assert legend.get_ylim()[1] == pytest.approx(0.9 / 8)
    assert legend.get_yticklabels()[-1].get_text() == "0.11 or more"
    assert even.axes[2].get_ylim()[1] == pytest.approx(0.02)
    assert not any("more" in label.get_text() for label in even.axes[2].get_yticklabels())


def test_caption_shows_the_picture_once_and_then_word_by_word_on_one_scale():
    A = weights(torch.randn(1, 1, 3, 8), torch.randn(1, 1, 16, 8))
    figure = caption(A, np.zeros((20, 20, 3), dtype=np.uint8), ["a", "小", "dog"])
    plain, *panels, legend = figure.axes
    assert np.asarray(plain.images[0].get_array()).shape == (20, 20, 3)
    dense = A.dense()[0, 0].view(3, 4, 4).numpy()
    most = legend.get_ylim()[1]
    for panel, values in zip(panels, dense, strict=True):
        close(panel.images[0].get_array()[::32, ::32], blend(np.zeros((4, 4)), values, most), atol=1e-6)
    assert [panel.get_title() for panel in panels] == ["a", "小", "dog"]
    written(figure)


@pytest.mark.parametrize(("words", "rows"), [(4, [5]), (5, [3, 3]), (10, [4, 4, 3]), (11, [4, 4, 4])])
def test_panels_stand_in_even_rows_and_the_legend_is_as_high_as_one(words, rows):
    figure = caption(np.ones((words, 9)), np.zeros((9, 9)), ["w"] * words)
    *panels, legend = figure.axes
    tops = [round(axes.get_position().y1, 4) for axes in panels]
    assert [tops.count(top) for top in dict.fromkeys(tops)] == rows
    assert legend.get_position().height == pytest.approx(panels[0].get_position().height)
    assert legend.get_position().x0 > max(axes.get_position().x1 for axes in panels)
    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    assert legend.get_tightbbox(renderer).x1 <= figure.bbox.x1


def test_alignment_joins_the_words_of_its_links():
    figure = alignment(Links.parse("0-1 1-0 2p0"), ["das", "ist", "gut"], ["good", "this"])
    axes = figure.axes[0]
    assert written(figure) == ["das", "ist", "gut", "good", "this"]
    assert [tuple(line.get_ydata()) for line in axes.lines] == [(0, 1), (1, 0), (2, 0)]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "--"]
    for source, target in (("das", 0), ("gut", 2)):
        assert next(t for t in axes.texts if t.get_text() == source).get_position()[1] == target


LONG = ["Donaudampfschifffahrtsgesellschaftskapitän", "https://example.org/a/very/long/address", "長" * 30, "W" * 24]


def test_edges_join_sources_and_targets():
    A = EdgeWeights(torch.tensor([[3, 0, 1], [1, 1, 0]]), torch.tensor([[0.5, 1.0], [0.5, 0.0], [1.0, 1.0]]), (2, 4))
    figure = edges(A, list("abcd"), list("xy"))
    assert [text.get_text() for text in figure.axes[0].texts] == [*"abcd", *"xy"]
    drawn = {(*map(int, line.get_ydata()), line.get_alpha()) for line in figure.axes[0].lines}
    assert drawn == {(1, 0, 1.0), (0, 1, 0.5), (3, 1, 0.5)}
    assert len(edges(A, head=1).axes[0].lines) == 2
    assert [text.get_text() for text in edges(A).axes[0].texts] == [*"0123", *"01"]


def test_edges_of_many_nodes_are_a_heatmap():
    ids = torch.arange(100)
    figure = edges(EdgeWeights(torch.stack((ids, ids.flip(0))), torch.ones(100, 1), 100))
    assert shown_values(figure.axes[0]).shape == (100, 100)


def test_edges_draw_edge_weights_alone():
    with pytest.raises(TypeError, match=r"A must be the EdgeWeights of a layer, got Tensor; heatmap\(A\) draws"):
        edges(torch.eye(3))


def test_alignment_shortens_long_words_and_cuts_none_at_its_edges():
    figure = alignment(Links.parse("0-0 1-1 2-2 3-3"), LONG, LONG[::-1])
    short = ["Donaudampfschifffahrtsg…", "https://example.org/a/v…", "長" * 23 + "…", "W" * 24]
    assert written(figure) == [*short, *short[::-1]]
    renderer = figure.canvas.get_renderer()
    for word in figure.axes[0].texts:
        box = word.get_window_extent(renderer)
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


def test_alignment_of_weights_is_as_dark_as_they_are():
    figure = alignment(torch.tensor([[0.5, 0.0], [0.25, 1.0]]), ["a", "b"], ["x", "y"])
    drawn = {tuple(line.get_ydata()): line.get_alpha() for line in figure.axes[0].lines}
    assert drawn == {(0, 0): 0.5, (0, 1): 0.25, (1, 1): 1.0}


def test_alignment_draws_what_is_a_number():
    nan, inf = torch.nan, torch.inf
    for cells, want in (
        ([[nan, 0.5], [0.25, 0.5]], {(1, 0): 1.0, (0, 1): 0.5, (1, 1): 1.0}),
        ([[inf, 0.5], [0.25, 0.5]], {(0, 0): 1.0, (1, 0): 1.0, (0, 1): 0.5, (1, 1): 1.0}),
        ([[-1.0, -2.0], [-3.0, -4.0]], {}),
    ):
        figure = alignment(torch.tensor(cells), ["a", "b"], ["x", "y"])
        assert {tuple(line.get_ydata()): line.get_alpha() for line in figure.axes[0].lines} == want


def test_pictures_may_be_of_any_float_and_weights_without_bound():
    figure = image(torch.tensor([[0.1, torch.inf, 0.2, 0.3]]), torch.rand(4, 4).bfloat16())
    figure.savefig(io.BytesIO())


def test_mask_is_drawn_as_it_draws_itself():
    term = Causal() & Window(3) | Global(1)
    figure = mask(term, 6, 9)
    seen = shown_values(figure.axes[0])
    assert ["".join("■" if x else "·" for x in line) for line in seen] == term.draw(6, 9).replace(" ", "").split("\n")
    assert repr(term) in written(figure)
    assert (shown_values(mask(np.eye(4, dtype=bool)).axes[0]) == np.eye(4)).all()


@pytest.mark.processes
def test_figures_leave_no_trace_in_pyplot_and_importing_regard_draws_nothing():
    code = (
        "import sys, regard; assert 'matplotlib' not in sys.modules\n"
        "import numpy, regard.views; regard.views.heatmap(numpy.eye(3)).savefig(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "/dev/stdout"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: mask(torch.zeros(3, 3)), r"mask must be boolean, .* got torch.float32; .* write mask == 0"),
        (lambda: mask(Causal(), 0, 0), "rows must be 1 or more, got 0"),
        (lambda: mask(None), "got NoneType"),
        (lambda: image(torch.rand(5, 5), torch.rand(8, 8), patches=(-2, -2)), r"patches must be 1 or more, got -2"),
        (lambda: image(torch.rand(1, 1), torch.rand(0, 0)), r"picture must have dims .* got shape \(0, 0\)"),
        (lambda: grid([torch.rand(0, 3, 3)]), r"heads, queries and keys to show, got shape \(0, 3, 3\)"),
        (lambda: by_layer([torch.rand(2, 0, 3)]), r"heads, queries and keys to show, got shape \(2, 0, 3\)"),
        (lambda: by_layer([weights(*torch.randn(2, 1, 2, 0, 8))]), r"to show, got shape \(1, 2, 0, 0\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        draw()


def test_bad_arguments_are_named():
    A = weights(*torch.randn(2, 2, 3, 5, 8))
    with pytest.raises(ValueError, match=r"one matrix of queries by keys, got shape \(2, 3, 5, 5\); write A.select"):
        heatmap(A)
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 3\); write A\[0, 0\]"):
        heatmap(torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        heatmap(torch.ones(3))
    with pytest.raises(ValueError, match="must have queries and keys to show"):
        heatmap(torch.ones(0, 3))
    with pytest.raises(TypeError, match="A must be a Weights, or a 2-D tensor or array, got list"):
        heatmap([[1.0]])
    with pytest.raises(ValueError, match="queries must hold 5 strings, got 4"):
        heatmap(np.eye(5), WORDS[:4])
    with pytest.raises(TypeError, match="keys must be a list of strings, got str"):
        heatmap(np.eye(5), WORDS, "words")
    with pytest.raises(ValueError, match="scale must be 'linear' or 'sqrt', got 'log'"):
        heatmap(np.eye(5), scale="log")
    for draw in (grid, by_layer):
        with pytest.raises(ValueError, match="the stack holds no layers"):
            draw([])
        with pytest.raises(ValueError, match="dims h i j"):
            draw([np.eye(3)])
    with pytest.raises(ValueError, match=r"a layer must have one batch row, got shape \(2, 3, 5, 5\)"):
        grid([A])
    for draw in (grid, by_layer):
        with pytest.raises(ValueError, match="layers must hold 1 strings, got 2"):
            draw([None], layers=["a", "b"])  # before the layer is looked at
    with pytest.raises(ValueError, match="query must be from 0 to 4"):
        text(np.eye(5), WORDS, query=5)
    with pytest.raises(ValueError, match="a coloured text holds at most 5000 tokens, got 5001"):
        text(np.ones((1, 5001)), ["a"] * 5001)
    with pytest.raises(ValueError, match="query must be from 0 to 0"):
        image(np.ones((1, 9)), np.zeros((9, 9)), query=1)
    with pytest.raises(
        ValueError, match=r"12 keys are not a square of patches, with or without a class token; pass patches="
    ):
        image(np.ones((1, 12)), np.zeros((9, 9)))
    with pytest.raises(
        ValueError, match=r"patches must be \(rows, columns\) with at most 12 patches in all, got \(4, 4\)"
    ):
        image(np.ones((1, 12)), np.zeros((9, 9)), patches=(4, 4))
    for patches in (4, (2, 2, 3)):
        with pytest.raises(TypeError, match=r"patches must be \(rows, columns\), got"):
            image(np.ones((1, 12)), np.zeros((9, 9)), patches=patches)
    with pytest.raises(TypeError, match=r"patches must be a whole number, got 3\.0"):
        image(np.ones((1, 12)), np.zeros((9, 9)), patches=(3.0, 4.0))
    for ask in (text, image):
        with pytest.raises(TypeError, match=r"query must be a whole number, got 0\.5"):
            ask(np.eye(5)[:, :4], WORDS[:4] if ask is text else np.zeros((9, 9)), query=0.5)
    with pytest.raises(TypeError, match=r"A must hold real numbers, got complex128; write A.real or abs\(A\)"):
        heatmap(np.eye(5) * 1j)
    with pytest.raises(TypeError, match="picture must hold real numbers, got complex64"):
        image(np.ones((1, 9)), torch.zeros(9, 9, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"picture must have dims y x, y x c or c y x.*got shape \(9, 9, 2\)"):
        image(np.ones((1, 9)), np.zeros((9, 9, 2)))
    with pytest.raises(ValueError, match="words must hold 2 strings"):
        caption(np.ones((2, 9)), np.zeros((9, 9)), ["a"])
    with pytest.raises(ValueError, match=r"links must be among 1 source and 2 target words, got \[\(1, 0\)\]"):
        alignment(Links([(1, 0)]), ["a"], ["b", "c"])
    with pytest.raises(ValueError, match=r"weights must have dims target source, \(2, 1\), got \(1, 2\)"):
        alignment(np.ones((1, 2)), ["a"], ["b", "c"])


def test_an_axis_without_names_counts_in_whole_numbers():
    figure = heatmap(torch.eye(4))
    FigureCanvasAgg(figure).draw()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert [float(place).is_integer() for place in axis.get_ticklocs()] == [True] * len(axis.get_ticklocs())


def test_over_a_picture_what_is_no_number_is_veiled():
    values = torch.full((2, 4), torch.nan)
    values[1] = torch.tensor([0.0, 0.2, 0.3, torch.nan])
    for query, veiled in ((0, [True] * 4), (1, [False, True, True, True])):
        figure = image(values, np.zeros((4, 4)), query=query)
        over = np.asarray(figure.axes[1].images[0].get_array())[::64, ::64]
        assert (over.sum(-1).ravel() > 0).tolist() == veiled
        assert figure.axes[2].get_ylabel() == "attention\n(grey: not a number)"
        FigureCanvasAgg(figure).draw()


def test_a_picture_of_one_colour_is_drawn():
    for value in (-3.0, 0.5, 255.0):
        for axes in image(np.ones((1, 4)) / 4, np.full((4, 4), value)).axes[:2]:
            assert np.isfinite(np.asarray(axes.images[0].get_array())).all()


def test_what_is_no_number_is_not_taken_for_nothing():
    A = torch.eye(4)
    A[1] = torch.nan
    figure = heatmap(A)
    [picture] = figure.axes[0].get_images()
    assert figure.axes[1].get_ylabel() == "attention\n(square-root scale, grey: not a number)"
    colours = picture.to_rgba(picture.get_array())
    assert np.array_equal(colours[1, 0], colours[1, 3])
    assert not np.allclose(colours[1, 0], colours[0, 1])
