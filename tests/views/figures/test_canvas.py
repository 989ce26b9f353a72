"""The canvas: whatever is written on a figure stays on it, beside what it is about, and over nothing else."""

import io
import re
import warnings
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.image import imread

from regard import Causal, Global, Window, weights
from regard.lens import capture
from regard.nn import Attention
from regard.views import by_layer, grid, heatmap, image, mask, text

NAMES = [f"bert.encoder.layer.{n}.attention.self" for n in range(4)]
LONG = "how far the heads of a model look back, layer by layer, in a title that goes on past the edge of the page"


def boxes(figure, texts):
    """Where texts stand, in pixels."""
    figure.savefig(io.BytesIO())
    return [text.get_window_extent(figure.canvas.get_renderer()) for text in texts]


def check_keys(figure, *more):
    """All that is written on the paper itself is within it."""
    for box in boxes(figure, [*figure.texts, *more]):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height


@pytest.mark.thorough
@pytest.mark.parametrize(
    "draw",
    [
        lambda: heatmap(np.eye(3), title=LONG),
        lambda: heatmap(np.eye(3), title="x" * 200),
        lambda: mask((Causal() & Window(3) | Global(1)) & (Window(300) | Global(13)), 5, 5),
        lambda: grid([np.ones((1, 300, 300))], title=LONG),
        lambda: by_layer([np.ones((2, 3, 3)) / 3], title=LONG),
        lambda: image(np.ones((4, 4)) / 4, np.ones((8, 8)), title=LONG),
    ],
)
def test_long_titles_are_written_in_lines(draw):
    figure = draw()
    check_keys(figure)
    assert max(text.get_text().count("\n") for text in figure.texts) >= 1
    plain = heatmap(np.eye(3)).axes[0].get_position()
    assert figure.axes[0].get_position().width > 0.4 * plain.width


def test_panels_stay_where_they_are_under_a_style_that_arranges_figures():
    with rc_context({"figure.constrained_layout.use": True}), warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = image(np.ones((4, 4)) / 4, np.ones((8, 8)))
        figure.savefig(io.BytesIO())
        figure.savefig(io.BytesIO())  # saved twice, as in a notebook that also writes the file


def test_a_title_may_be_a_number():
    assert [text.get_text() for text in heatmap(np.eye(3), title=5).texts] == ["5"]
    assert heatmap(np.eye(3)).texts == []


def test_names_of_layers_lie_beside_their_maps_and_apart():
    figure = grid([np.random.rand(2, 9, 9)] * 4, layers=NAMES)
    firsts = [axes for axes in figure.axes if axes.get_ylabel() and axes.images]
    labels = [axes.yaxis.label for axes in firsts]
    assert [label.get_rotation() for label in labels] == [0] * 4
    check_keys(figure, *labels)
    found = boxes(figure, labels)
    assert all(above.y0 > below.y1 for above, below in pairwise(found))
    assert all(box.x1 < axes.bbox.x0 for box, axes in zip(found, firsts, strict=True))


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (NAMES, ["0", "1", "2", "3"]),
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], ["0", "1"]),
        (["model.layers.0.self_attn"], ["model.layers.0.self_attn"]),
        (
            [f"model.vision_tower.vision_model.encoder.layers.{n}.self_attn" for n in range(3)]
            + ["model.language_model.layers.0.self_attn"],
            [*(f"vision_tower.vision_model.encoder.layers.{n}" for n in range(3)), "language_model.layers.0"],
        ),
        ([f"{'deep.' * 20}{n}.attention" for n in range(2)], ["0", "1"]),
        (["deep." * 20 + "attention"] * 2, ["attention"] * 2),
        (["deep." * 20 + "attention"], [("deep." * 20)[:47] + "…"]),
    ],
)
def test_names_of_layers_are_shortened_to_what_tells_them_apart(names, written):
    stack = [np.ones((2, 3, 3)) / 3] * len(names)
    maps = [axes for axes in grid(stack, layers=names).axes if axes.images]
    assert [axes.get_ylabel() for axes in maps if axes.get_ylabel()] == written
    assert [label.get_text() for label in by_layer(stack, layers=names).axes[1].get_xticklabels()] == written


def test_every_column_of_a_grid_is_named_where_it_begins():
    figure = grid([np.ones((heads, 3, 3)) / 3 for heads in (1, 3, 2, 4)])
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ["head 0", "", "head 1", "head 2", "", "", "", "", "", "head 3"]


def test_maps_of_a_grid_are_placed_without_an_engine_that_takes_minutes_over_many():
    figure = grid([np.ones((3, 4, 4)) / 4] * 2, title="all")
    assert figure.get_layout_engine() is None
    maps = [axes.bbox for axes in figure.axes if axes.images]
    assert len({(round(box.width, 3), round(box.height, 3)) for box in maps}) == 1
    assert not any(one.overlaps(other) for one, other in combinations(maps, 2))


def test_panels_keep_their_height_under_long_names():
    figure, plain = by_layer([np.ones((2, 3, 3)) / 3] * 4, layers=NAMES), by_layer([np.ones((2, 3, 3)) / 3] * 4)
    for one in (figure, plain):
        one.savefig(io.BytesIO())
    assert figure.axes[0].bbox.height > 0.9 * plain.axes[0].bbox.height
    check_keys(figure, *figure.axes[1].get_xticklabels())


def test_a_layer_without_batch_rows_is_refused():
    with pytest.raises(ValueError, match=r"a layer must have batch rows, heads, .* got shape \(0, 2, 5, 5\)"):
        by_layer([weights(*torch.randn(2, 0, 2, 5, 8))])


def test_vector_files_are_cropped_and_say_where_they_come_from(tmp_path):
    A = weights(*torch.randn(2, 1, 1, 5, 8), mask=Causal())
    figure = heatmap(A, title="one head")
    figure.savefig(tmp_path / "map.svg")
    found = (tmp_path / "map.svg").read_text()
    for line in ("one head", "Weights(1 x 1 x 5 x 5, mask=Causal()) · regard"):
        assert f"<!-- {line}" in found
    wide, high = (float(x) for x in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', found).groups())
    assert (wide, high) < tuple(72 * figure.get_size_inches())
    figure.savefig(tmp_path / "map.png", dpi=100)
    assert imread(tmp_path / "map.png").shape[:2] == tuple((figure.get_size_inches()[::-1] * 100).astype(int))
    assert "regard" not in str([text.get_text() for text in figure.texts])


def test_a_figure_of_a_tape_names_the_model():
    with torch.no_grad(), capture(model := Attention(16, heads=2)) as tape:
        model(torch.randn(1, 5, 16))
    assert grid(tape).provenance == by_layer(tape).provenance == "capture of regard.nn.attention.Attention"
    assert text(np.eye(3), ["a", "b", "c"]).provenance == "ndarray(3 x 3)"
