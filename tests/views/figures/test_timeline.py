"""Heads over training steps: each cell is a number of the history, and each event is marked at its step and head."""

import math

import numpy as np
import pytest
import torch

from regard.lens import HeadEvent, HeadHistory
from regard.views import timeline


def small(events=()):
    history = HeadHistory(("logit", "entropy"), events)
    for n, step in enumerate((1, 51, 101)):
        x = torch.arange(5.0) * (n + 1) - 1
        history.add(step, {"layers.0.attn": {"logit": x[:2]}, "layers.1.attn": {"logit": x[2:], "entropy": x[2:]}})
    return history


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title("left")]


def test_each_cell_is_the_number_of_a_head_at_a_step():
    history = small()
    logit, entropy = panels(timeline(history, title="a run"))
    drawn = np.ma.filled(logit.images[0].get_array(), np.nan)
    expected = torch.cat(list(history["logit"].values()), 1).T.clamp(min=0)
    assert np.allclose(drawn, expected.numpy())
    assert np.isnan(np.ma.filled(entropy.images[0].get_array(), np.nan)[:2]).all()
    assert [label.get_text() for label in logit.get_yticklabels()] == ["0", "1"]
    assert [label.get_text() for label in entropy.get_xticklabels() if label.get_text()] == ["1", "51", "101"]


def test_events_are_marked_at_their_step_and_head_in_the_panel_of_their_measure():
    events = [
        HeadEvent(51, "logit", "layers.1.attn", 1, 60.0, ""),
        HeadEvent(101, "collapse", "layers.0.attn", 0, 0.01, ""),
        HeadEvent(101, "equal heads", "layers.1.attn", None, 0.0, ""),
        HeadEvent(101, "logit", "gone", 0, 60.0, ""),
    ]
    figure = timeline(small(events))
    logit, entropy = ([line.get_xydata().tolist()[0] for line in axes.lines[1:]] for axes in panels(figure))
    assert logit == [[1, 3], [2, 3]]
    assert entropy == [[2, 0]]
    assert [text.get_text() for text in figure.texts][-1] == "events: ▲ logit, ◆ equal heads, ● collapse"
    (alone,) = panels(timeline(small(events), measures=["entropy"]))
    assert len(alone.lines) == 4


def test_a_monitor_and_a_folder_are_drawn_too(tmp_path):
    history = small()
    history.save(tmp_path)
    assert len(panels(timeline(tmp_path))) == len(panels(timeline(str(tmp_path)))) == 2
    monitor = type("Monitored", (), {"history": history})()
    figure = timeline(monitor, measures=["logit"])
    figure.savefig(tmp_path / "heads.svg")
    assert "heads over steps 1 to 101" in (tmp_path / "heads.svg").read_text()


def test_numbers_that_are_not_finite_are_drawn_as_missing():
    history = HeadHistory(("logit",))
    history.add(1, {"a": {"logit": torch.tensor([math.inf, -math.inf, 1.0])}})
    (axes,) = panels(timeline(history))
    assert np.ma.filled(axes.images[0].get_array(), np.nan)[2, 0] == 1.0


def test_a_history_without_a_step_is_refused():
    with pytest.raises(ValueError, match="the history has no step yet; watch at least one"):
        timeline(HeadHistory(("logit",)))
    with pytest.raises(KeyError, match="'sink' was not watched"):
        timeline(small(), measures=["sink"])
