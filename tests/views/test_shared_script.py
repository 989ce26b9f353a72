"""Pages of one notebook share a script: the first output holds it, and the cell of that output brings it again."""

import sys
from types import SimpleNamespace

import pytest

from regard.views import shared_script
from regard.views.shared_script import DATA_MARK, TITLE_MARK, shared_frame

TEMPLATE = f"<title>{TITLE_MARK}</title>{DATA_MARK}</script>"


@pytest.fixture
def kernel(monkeypatch):
    """A kernel whose running cell the test names."""
    state = SimpleNamespace(cell=None)
    get_parent = lambda channel: {"metadata": {} if state.cell is None else {"cellId": state.cell}}  # noqa: E731
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=get_parent), user_ns={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(shared_script, "_cell_of_template", {})
    return state


def holds_template(output):
    return "window.regardPages = window.regardPages" in output


def test_outside_of_a_kernel_and_in_colab_nothing_is_shared(kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    assert shared_frame(TEMPLATE, "data", "title", "") is None
    monkeypatch.delitem(sys.modules, "google.colab")
    assert shared_frame(TEMPLATE, "data", "title", "") is not None
    monkeypatch.delitem(sys.modules, "IPython")
    assert shared_frame(TEMPLATE, "data", "title", "") is None


def test_the_first_output_alone_holds_the_template(kernel):
    outputs = [shared_frame(TEMPLATE, "data", "title", "") for _ in range(3)]
    assert [holds_template(output) for output in outputs] == [True, False, False]
    assert holds_template(shared_frame(TEMPLATE + "new", "data", "title", ""))


def test_the_cell_of_the_template_brings_it_again(kernel):
    found = []
    for kernel.cell in ("a", "b", "a", "b", "a"):
        found.append(holds_template(shared_frame(TEMPLATE, "data", "title", "")))
    assert found == [True, False, True, False, True]


def test_nothing_ends_the_script_or_stands_in_it_as_markup(kernel):
    output = shared_frame(TEMPLATE, "</script><b>", "</title><b>", "<img alt=before>")
    assert output.count("</script>") == output.count("<script>") == 2
    assert "<b>" not in output
    assert output.index("<img alt=before>") < output.index("<script>")
