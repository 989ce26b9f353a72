"""Three exercises a chapter, from easy to hard, each with a hint and a solution that runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
CHAPTERS = sorted(path.stem for path in (DOCS / "book").glob("[0-9]*.md"))
LEVELS = ("Easy", "Medium", "Hard")


def exercises(stem: str) -> dict[str, str]:
    """The text of each exercise of a chapter, by its level."""
    parts = (DOCS / "exercises" / f"{stem}.md").read_text(encoding="utf8").split("\n### ")[1:]
    return {part.partition("\n")[0]: part for part in parts}


@pytest.mark.parametrize("stem", CHAPTERS)
def test_a_chapter_has_three_exercises_with_hints_and_solutions(stem):
    found = exercises(stem)
    assert tuple(found) == LEVELS
    for text in found.values():
        question, _, rest = text.partition('??? tip "Hint"\n\n    ')
        hint, _, solution = rest.partition('??? success "Solution"\n\n    ')
        assert len(question.split()) > 10
        assert hint.strip()
        assert "assert" in solution


@pytest.mark.chapters
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stem", CHAPTERS)
def test_a_solution_runs(stem, level):
    [code] = re.findall(r"^    ```python\n(.*?)^    ```", exercises(stem)[level], flags=re.DOTALL | re.MULTILINE)
    exec(compile(textwrap.dedent(code), f"{stem}, {level}", "exec"), {"__name__": "solution"})


def test_one_exercise_finds_the_head_behind_a_spike():
    assert "Monitor(" in exercises("11_training")["Medium"]
