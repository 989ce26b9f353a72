"""The page of cases: its counts, its order, and an environment without a second PyTorch."""

from __future__ import annotations

import pytest

from tests.lens.libraries.__main__ import FILES, PAGE, page
from tests.lens.libraries.environment import requirements
from tests.lens.libraries.judge import FAILED, NOT_INSTALLED, REFUSED, RIGHT, Row


def test_the_page_counts_the_cases_that_ran():
    rows = [Row("a", "one", RIGHT, matrices=2), Row("b", "two", REFUSED, "no | reason"), Row("c", "", NOT_INSTALLED)]
    text = page([*rows, Row("d", "three", FAILED)])
    assert "2 cases ran" in text
    assert "| right | 1 |" in text
    assert "| wrong | 0 |" in text
    assert "| a |  | one | right | 2 |  |" in text


def test_a_page_is_the_same_for_the_same_rows():
    rows = [Row("b", "two", RIGHT), Row("a", "one", RIGHT)]
    assert page(rows) == page(rows)
    assert page(rows).index("| b |") < page(rows).index("| a |")


def test_no_requirement_is_another_pytorch(tmp_path):
    assert not any(each.startswith(("torch==", "triton", "nvidia")) for each in requirements())
    path = tmp_path / "requirements.txt"
    path.write_text("timm==1.0\ntorch==2.13.0\n", encoding="utf8")
    with pytest.raises(ValueError, match="share the PyTorch"):
        requirements(path)


def test_every_requirement_has_a_version():
    assert all(each.count("==") == 1 for each in requirements())


def test_every_file_of_cases_is_in_the_runner():
    files = {path.stem for path in (PAGE.parents[1] / "tests/lens/libraries").glob("*.py")}
    other = {"__init__", "__main__", "aten_truth", "case", "environment", "judge", "one_library", "small_sizes"}
    assert set(FILES) == {name for name in files - other if not name.startswith("test_")}
