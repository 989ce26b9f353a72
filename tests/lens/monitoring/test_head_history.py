"""The history of heads: what it holds, and the files it is written to and read from."""

import csv

import pytest
import torch
from safetensors.torch import load_file

from regard.lens import HeadEvent, HeadHistory
from regard.lens.monitoring import head_history
from regard.lens.monitoring.head_history import EVENTS, TABLE, TENSORS


def small(steps=(1, 51)):
    history = HeadHistory(("logit", "entropy"))
    for step in steps:
        x = torch.arange(6.0) / 7 + step
        history.add(step, {"(model)": {"logit": x[:2], "entropy": x[2:4]}, "a, b": {"logit": x[4:]}})
    history.events.append(HeadEvent(steps[-1], "sink", "a, b", 1, 0.95, 'a "text", with commas'))
    history.events.append(HeadEvent(steps[-1], "equal heads", "(model)", None, 0.0, "x"))
    return history


def test_files_hold_the_history(tmp_path):
    history = small()
    history.save(tmp_path)
    found = HeadHistory.load(tmp_path)
    assert (found.steps, found.measures, found.layers) == (history.steps, history.measures, history.layers)
    for name in history.measures:
        torch.testing.assert_close(found[name], history[name], atol=0, rtol=0, equal_nan=True)
    assert found["entropy"]["a, b"].isnan().all()
    assert found.events[0]._replace(value=0.95) == history.events[0]
    assert found.events[1].head is None
    tensors = load_file(tmp_path / TENSORS)
    assert torch.equal(tensors["steps"], torch.tensor([1, 51]))
    assert torch.equal(tensors["logit/(model)"], history["logit"]["(model)"])
    with (tmp_path / TABLE).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[4]["step"] == "51"
    assert float(rows[4]["logit"]) == 51.0


def test_a_table_that_is_appended_to_is_that_of_a_whole_write(tmp_path, monkeypatch):
    monkeypatch.setattr(head_history, "FILES_OF_EVERY_STEP", 1)
    grown = HeadHistory(("logit",))
    grown.save(tmp_path / "grown")
    for step in range(5):
        grown.add(step, {"a": {"logit": torch.tensor([step / 3])}})
        grown.append_to(tmp_path / "grown")
    grown.save(tmp_path / "whole")
    for name in (TABLE, EVENTS):
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_line_that_was_cut_drops_its_step(tmp_path):
    small().save(tmp_path)
    path = tmp_path / TABLE
    path.write_text(path.read_text()[:-5])
    assert HeadHistory.load(tmp_path).steps == [1]


def test_upto_drops_later_steps_and_their_events():
    found = small().upto(50)
    assert (found.steps, found.events) == ([1], [])
    assert repr(small()) == "HeadHistory(logit, entropy of 4 heads in 2 layers at 2 steps, steps 1 to 51, 2 events)"


def test_what_is_not_there_is_named(tmp_path):
    history = small()
    with pytest.raises(KeyError, match="'sink' was not watched, only logit, entropy; add it to measures="):
        history["sink"]
    with pytest.raises(KeyError, match="'sink' was not watched"):
        history.latest("sink", "")
    with pytest.raises(KeyError, match="no layer 'c' was watched at the last step, only \\(model\\), a, b"):
        history.latest("logit", "c")
    with pytest.raises(ValueError, match="steps must rise, got 51 after 51"):
        history.add(51, {})
    with pytest.raises(FileNotFoundError, match=r"heads.csv does not exist; watch a run with Monitor"):
        HeadHistory.load(tmp_path)
    (tmp_path / TABLE).write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="must begin with the columns step, layer, head, got x, y"):
        HeadHistory.load(tmp_path)
    (tmp_path / TABLE).write_text("step,layer,head,logit\n1,a,0,word\n")
    with pytest.raises(ValueError, match=r"is not a table of heads: .*; move it away"):
        HeadHistory.load(tmp_path)
