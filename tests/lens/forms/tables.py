"""Write the tables of forms into README.md and docs/guides/own_model.md: `python -m tests.lens.forms.tables`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .form import OUTCOMES, REFUSED, Form
from .left_out import FORMS as LEFT_OUT
from .seen import FORMS as SEEN_FORMS

ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- forms of attention: begin -->", "<!-- forms of attention: end -->"
HEAD = "| attention | under `capture` | on the tape; the kind in `tape.unseen`; the message |\n|---|---|---|\n"
FORMS: tuple[Form, ...] = (*SEEN_FORMS, *LEFT_OUT)


def whole_table(forms: Sequence[Form]) -> str:
    """Return the table of docs: a row for each form.

    >>> print(whole_table([Form(name="a", family="b", outcome="seen", shown="c", examples=[])]))
    | attention | under `capture` | on the tape; the kind in `tape.unseen`; the message |
    |---|---|---|
    | a | seen | c |
    <BLANKLINE>
    """
    rows = (
        f"| {each.name} | {each.outcome} | {f'“{each.shown}”' if each.outcome == REFUSED else each.shown} |\n"
        for each in forms
    )
    return (
        "| attention | under `capture` | on the tape; the kind in `tape.unseen`; the message |\n|---|---|---|\n"
        + "".join(rows)
    )


def short_table(forms: Sequence[Form]) -> str:
    """Return the table of the README: a row for each outcome, with the families of its forms."""
    rows = []
    for outcome in OUTCOMES:
        families = dict.fromkeys(each.family for each in forms if each.outcome == outcome)
        rows.append(f"| {outcome} | {'; '.join(families)} |\n")
    return "| under `capture` | attention |\n|---|---|\n" + "".join(rows)


PAGES = {ROOT / "README.md": short_table, ROOT / "docs" / "guides" / "own_model.md": whole_table}


def replaced(text: str, table: str) -> str:
    """Return a page with a table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must hold the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def main() -> None:
    for path, table in PAGES.items():
        path.write_text(replaced(path.read_text(encoding="utf8"), table(FORMS)), encoding="utf8")


if __name__ == "__main__":
    main()
