"""The page of the heads of a run: its data, its policy, and what a browser shows."""

import json
import re

import pytest
import torch

from regard.lens import HeadEvent, HeadHistory
from regard.views import heads_page
from regard.views.heads_page import heads_document


def history(steps=3, events=()):
    found = HeadHistory(("logit", "entropy"), events)
    for n in range(steps):
        x = torch.arange(5.0) * (n + 1) - 1
        found.add(1 + 10 * n, {"a": {"logit": x[:2]}, "<b>": {"logit": x[2:], "entropy": x[2:]}})
    return found


EVENTS = [
    HeadEvent(11, "logit", "<b>", 1, 60.0, "</script>"),
    HeadEvent(21, "equal heads", "<b>", None, 0.0, "the same"),
    HeadEvent(21, "collapse", "a", 0, 0.0, "low"),
    HeadEvent(21, "sink", "gone", 0, 0.0, ""),
]


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.text, re.DOTALL)[1])


def test_data_holds_every_number_and_null_for_what_is_missing():
    found = data_of(heads_page(history(events=EVENTS)))
    assert found["steps"] == [1, 11, 21]
    assert found["layers"] == [{"name": "a", "heads": 2}, {"name": "<b>", "heads": 3}]
    logit, entropy = found["measures"]
    assert logit["values"][1] == [0.0, 1.0, 2.0]
    assert entropy["values"][0] == [None, None, None]
    assert [(event["at"], event["row"], event["panel"]) for event in found["events"]] == [
        (1, 3, "logit"),
        (2, 3, "logit"),
        (2, 0, "entropy"),
    ]


def test_a_long_history_keeps_some_steps_and_those_with_events(monkeypatch):
    monkeypatch.setattr(heads_document, "MAX_STEPS", 4)
    found = data_of(heads_page(history(9, EVENTS)))
    assert found["steps"] == [1, 11, 21, 31, 61]
    assert found["about"].endswith("4 events; one in 3 is drawn, and those with events")
    monkeypatch.setattr(heads_document, "MAX_NUMBERS", 10)
    monkeypatch.setattr(heads_document, "MIN_STEPS", 2)
    assert data_of(heads_page(history(9)))["steps"] == [1, 51]


def test_the_page_loads_nothing_and_escapes_names():
    page = heads_page(history(events=EVENTS), title="</title><i>").text
    assert "<i>" not in page
    assert "<b>" not in page
    assert page.count("</script>") == 3
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_a_history_without_a_step_is_refused():
    with pytest.raises(ValueError, match="the history has no step yet"):
        heads_page(HeadHistory(("logit",)))


@pytest.mark.browser
def test_a_browser_shows_the_numbers_of_a_cell_and_of_a_step(chromium, tmp_path):
    heads_page(history(events=EVENTS)).save(tmp_path / "heads.html")
    page, wrong = chromium.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    page.goto((tmp_path / "heads.html").as_uri())
    canvas = page.locator("canvas").first
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] / 2, "y": box["height"] * 0.3})  # the second of three steps and five heads
    assert page.inner_text(".cell") == "step 11 · a, head 1 · logit 1 · entropy not measured"
    page.click(".events button >> nth=0")
    assert page.inner_text(".step h2") == "Step 11"
    assert page.inner_text(".step tr:nth-child(5)").split("\t") == ["<b>, head 1", "5", "5"]
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".step h2") == "Step 21"
    assert wrong == []
    page.close()
