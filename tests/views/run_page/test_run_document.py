"""The document of a run page, the data in it, and what a browser shows."""

import json
import re

import pytest
import torch

from regard.lens import HeadEvent, HeadHistory
from regard.views.heads_page.heads_document import heads_to_json
from regard.views.run_page.run_document import MAX_POINTS, RunState, run_page, to_json


def state(**changed):
    curves = {"training/loss": ([10, 20, 30], [2.0, float("inf"), 1.0]), "evaluation/loss": ([30], [1.5])}
    return RunState(**{"name": "deen", "curves": curves, "best": 30, "steps": 40} | changed)


def test_data_holds_every_point_and_null_for_what_is_not_finite():
    found = to_json(state(settings={"model": {"dim": 16, "load": None}}))
    [panel] = found["panels"]
    assert panel["lines"] == [
        {"label": "training", "steps": [10, 20, 30], "values": [2.0, None, 1.0], "each": 1},
        {"label": "evaluation", "steps": [30], "values": [1.5], "each": 1},
    ]
    assert found["settings"] == {"model": {"dim": "16"}}


def test_long_lines_are_means_of_rows_and_say_so():
    n = 2 * MAX_POINTS + 1
    found = to_json(state(curves={"training/loss": (range(1, n + 1), [float(x) for x in range(n)])}))
    line = found["panels"][0]["lines"][0]
    assert line["each"] == 3
    assert len(line["steps"]) == len(line["values"]) == -(-n // 3)
    assert (line["steps"][0], line["values"][0]) == (3, 1.0)
    assert (line["steps"][-1], line["values"][-1]) == (n, n - 1.5)


def test_offline_page_holds_the_run_and_its_heads_and_escapes_names():
    named = state(name="</script><b>", settings={"<i>": {"a": "</script>"}}, heads_version="9")
    page = run_page(named, history()).text
    assert "</script><b>" not in page
    assert "<b>" not in page
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["run"] == to_json(named)
    assert data["heads"] == heads_to_json(history())
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_page_of_a_run_that_was_not_watched_has_no_heads():
    for page in (run_page(state()), run_page(state(), HeadHistory(("logit",)))):
        assert '"heads": null' in page.text


def history():
    found = HeadHistory(("logit",), [HeadEvent(11, "logit", "a", 1, 60.0, "large")])
    for step in (1, 11, 21):
        found.add(step, {"a": {"logit": torch.tensor([1.0, step + 0.5])}})
    return found


def read_tab(page, name):
    page.click(f"#tab-{name}")
    return page.inner_text(f"#{name}")


@pytest.mark.browser
def test_tabs_of_an_offline_page_show_curves_and_heads(chromium, tmp_path):
    run_page(state(heads_version="9"), history()).save(tmp_path / "run.html")
    page, wrong = chromium.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    page.goto((tmp_path / "run.html").as_uri())
    assert page.inner_text("#panels h2") == "loss"
    assert "training 1 at 30" in page.inner_text("#panels .values").replace("\n", " ")
    assert "step 30 of 40 · best checkpoint: step 30" in page.inner_text("#state")
    assert "1 value is not finite" in page.inner_text("#panels")
    assert "largest logit" in read_tab(page, "heads")
    canvas = page.locator("#heads canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] * 0.75})  # the second of three steps
    assert page.inner_text("#heads .cell") == "step 11 · a, head 1 · logit 11.5"
    assert page.inner_text("#heads .step h2") == "Step 11"
    assert page.inner_text("#heads .step tr:last-child").split("\t") == ["a, head 1", "11.5"]
    assert page.inner_text("#heads .events td:last-child") == "large"
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#heads .step h2") == "Step 21"
    page.focus("#tab-heads")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#panels")
    assert not page.is_visible("#heads")
    page.goto((tmp_path / "run.html").as_uri() + "#heads")
    page.reload()
    assert page.is_visible("#heads canvas")
    assert wrong == []
    page.close()
