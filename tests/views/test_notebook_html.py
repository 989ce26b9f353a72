"""A tape in a notebook: text, the page if it is quick to make, else a picture or words; in a real browser too."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.views import notebook_html, shared_script
from tests.views.viewer.test_browser_frames import page_of

SCRIPT_CHARACTERS = 300_000  # at least, in an output that holds it


@pytest.fixture
def tape():
    torch.manual_seed(0)
    made = {(f"layers.{n}", 0): weights(*torch.randn(2, 1, 3, 6, 8), mask=Causal()) for n in range(2)}
    tape = Tape(made)
    tape.tokens = list("abcdef")
    return tape


@pytest.fixture
def kernel(monkeypatch):
    shell = SimpleNamespace(kernel=SimpleNamespace(), user_ns={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(shared_script, "_cell_of_template", {})


def test_a_tape_is_its_text_and_its_page(tape):
    shown = tape._repr_html_()
    assert shown.startswith("<pre>Tape(2 layers)")
    assert shown.count("<iframe sandbox") == 1


@pytest.mark.usefixtures("kernel")
def test_outputs_of_one_notebook_hold_the_script_once(tape):
    outputs = [tape._repr_html_(), tape._repr_html_(), tape.page()._repr_html_()]
    assert len(outputs[0]) > SCRIPT_CHARACTERS
    assert all(len(output) < SCRIPT_CHARACTERS / 3 for output in outputs[1:])
    assert '<img alt="attention of 3 heads in 2 layers' in outputs[1]


def test_a_long_tape_is_words_and_with_summaries_a_picture(tape, monkeypatch):
    monkeypatch.setattr(notebook_html, "MAX_WEIGHTS", 10)
    shown = tape._repr_html_()
    assert "<img" not in shown
    assert "<iframe" not in shown
    assert "<code>tape.view()</code> opens the viewer" in shown
    assert not tape.summarized(0)
    tape.summarize()
    shown = tape._repr_html_()
    assert "<img" in shown
    assert "<iframe" not in shown


def test_a_tape_without_anything_is_its_text():
    assert Tape({})._repr_html_() == "<pre>Tape(0 layers)</pre>"


@pytest.mark.browser
@pytest.mark.usefixtures("kernel")
def test_outputs_work_in_a_static_file_without_a_server(tape, chromium, tmp_path):
    outputs = [tape._repr_html_(), tape._repr_html_(), tape.page(name="</title>a <b>")._repr_html_()]
    assert [len(output) > SCRIPT_CHARACTERS for output in outputs] == [True, False, False]
    path = tmp_path / "notebook.html"
    path.write_text(
        "<!doctype html><meta charset=utf-8>"
        + "".join(f"<div class=o{n}>{output}</div>" for n, output in enumerate(outputs))
    )
    with page_of(chromium) as page:
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(path.as_uri())
        for n in range(3):
            page.locator(f".o{n} iframe").scroll_into_view_if_needed()  # a frame out of sight draws nothing
            page.frame_locator(f".o{n} iframe").locator("button.head").nth(5).wait_for()
        assert not wrong
    path.write_text(outputs[1])  # the first output is gone: the picture stays
    with page_of(chromium) as page:
        page.goto(path.as_uri())
        page.wait_for_timeout(500)
        assert page.locator("img").count() == 1
        assert not page.locator("iframe").count()
    assert re.search(r"<p hidden>The script of this page was in another output", outputs[1])
