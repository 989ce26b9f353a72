"""The curves of a run: one panel for each metric."""

import pytest

from regard.views import curves
from regard.views.figures.curves import curve_panels

CURVES = {
    "training/epoch": ([10, 20], [0.0, 1.0]),
    "training/loss": ([10, 20], [2.0, float("nan")]),
    "training/rate": ([10, 20], [1e-3, 2e-3]),
    "training/norm": ([10, 20], [1.0, 2.0]),
    "training/tokens_per_second": ([10, 20], [100.0, 90.0]),
    "evaluation/loss": ([20], [1.5]),
    "evaluation/bleu": ([20], [30.0]),
    "attention/entropy/0": ([10, 20], [1.0, 2.0]),
    "attention/entropy/1": ([10, 20], [3.0, 4.0]),
}


def test_metrics_come_first_and_training_beside_evaluation():
    panels = curve_panels(CURVES)
    names = ["loss", "bleu", "rate", "norm", "tokens_per_second", "attention/entropy"]
    assert [panel.name for panel in panels] == names
    assert [line.label for line in panels[0].lines] == ["training", "evaluation"]
    assert [line.label for line in panels[-1].lines] == ["0", "1"]


def test_each_line_has_the_numbers_of_its_curve():
    figure = curves(CURVES, best=20, title="a run")
    drawn = {axes.get_title("left"): axes for axes in figure.axes if axes.axison}
    assert list(drawn) == [panel.name for panel in curve_panels(CURVES)]
    *_, training, evaluation = drawn["loss"].lines
    assert training.get_xydata().tolist()[0] == [10, 2.0]
    assert evaluation.get_xydata().tolist() == [[20, 1.5]]
    assert evaluation.get_marker() == "o"
    assert drawn["bleu"].lines[0].get_xdata() == [20, 20]  # the best checkpoint
    assert [text.get_text() for text in drawn["loss"].get_legend().get_texts()] == ["training", "evaluation"]
    figure.savefig("/dev/null", format="png")


def test_run_without_a_metric_is_refused():
    with pytest.raises(ValueError, match="curves need at least one metric, got none"):
        curves({"training/epoch": ([1], [0.0])})
