"""The tables of docs/results.md, one a chapter, written anew between their marks from the rows of the ledger."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from .ledger import Row
from .recipe import Measure, Recipe

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEAD = "| model | data | measured | value | to reach | published beside it | training |\n" + "|---" * 7 + "|\n"
CHAPTERS = (  # what a task begins with, in the order of the page
    *("translation", "alignment", "language model", "question answering", "pretraining", "sentiment"),
    *("summarization", "image classification", "captioning", "image generation", "long context"),
)


def write(recipes: Mapping[str, Recipe], rows: Sequence[Row], page: Path = PAGE) -> None:
    """Put the tables into the page."""
    before, _, rest = page.read_text(encoding="utf8").partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise ValueError(f"{page} must hold the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{drawn(recipes, rows)}{END}{after}", encoding="utf8")


def drawn(recipes: Mapping[str, Recipe], rows: Sequence[Row]) -> str:
    """A line for each measure of each recipe that has rows; the last row of a seed counts."""
    chapters: dict[str, list[str]] = {chapter: [] for chapter in CHAPTERS}
    for recipe in recipes.values():
        chapter, _, model = recipe.task.partition(", ")
        about = (model or recipe.task, recipe.data)
        for measure in recipe.measure:
            own = {row.seed: row for row in rows if (row.recipe, row.metric) == (recipe.name, measure.name)}
            if own:
                chapters.setdefault(chapter, []).append(_line(about, measure, list(own.values())))
                about = ("", "")  # said once
    tables = [f"\n## {chapter.capitalize()}\n\n{HEAD}{''.join(lines)}" for chapter, lines in chapters.items() if lines]
    return "".join(tables) + "\n"


def _line(about: tuple[str, str], measure: Measure, rows: Sequence[Row]) -> str:
    values = [row.value for row in rows]
    mean = statistics.mean(values)
    value = f"{mean:,.0f}" if mean >= 1000 else f"{mean:.2f}" if mean >= 10 else f"{mean:.4g}"
    if len(values) > 1:
        value += f" ± {statistics.stdev(values):{',.0f' if mean >= 1000 else '.2f'}} ({len(values)} seeds)"
    bar = "" if measure.bar is None else f"{measure.bar:g}"
    if measure.bar is not None:
        bar += " reached" if measure.reached(mean) else " **missed**"
    last = rows[-1]
    training = f"{last.steps:,} steps, {last.seconds:.0f} s, {last.speed}" if last.steps else ""
    notes = ", ".join(dict.fromkeys(row.note for row in rows if row.note))
    told = f"{training}; {notes}" if notes else training
    cells = (*about, measure.name, value, bar, measure.published, told if any(about) else "")
    return "| " + " | ".join(cells) + " |\n"
