"""Messages, docstrings and pages are plain: habits of `tests/prose.py` are counted, and the counts only fall."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.prose import KINDS, PATTERNS, Match, Text, matches, page_texts, source_texts, without_code

CEILINGS = tomllib.loads((Path(__file__).parent / "prose.toml").read_text(encoding="utf8"))
SHORT = ("message", "help")


@pytest.fixture(scope="module")
def found() -> list[Match]:
    return matches()


def over(counts: Counter[str], ceilings: dict[str, int]) -> dict[str, str]:
    """Rooms that are above their ceiling."""
    return {room: f"{n} > {ceilings.get(room, 0)}" for room, n in counts.items() if n > ceilings.get(room, 0)}


def test_messages_and_help_have_none_of_the_habits(found):
    counts = Counter(match.text.room for match in found if match.text.kind in SHORT)
    assert counts == {}, "python -m tests.prose --kind message --list all"


def test_no_room_rises_above_its_ceiling(found):
    counts = Counter(match.text.room for match in found)
    assert over(counts, CEILINGS["all"]) == {}, "python -m tests.prose --list all ROOM"
    assert sum(CEILINGS["all"].values()) <= 150


@pytest.mark.parametrize(
    ("name", "kind", "bad", "good"),
    [
        ("headless", "docstring", "What was kept of each call.", "Recorded attention per (layer, call)."),
        ("question", "docstring", "Has nothing been seen?", "Return whether no attention call was recorded."),
        ("nobody", "message", "no key that anybody sees is left", "no visible key is left"),
        ("told", "message", "a layer of which it is told", "shapes are large enough to be told apart"),
        ("what-is-done", "help", "what was looked at: a .png", "attention maps: a .png"),
        ("of-which", "page", "those of whose own keys nothing is seen", "6 heads, of which 2 share keys"),
        ("understood", "message", "flash_attn with rotary_cos, which is not understood", "rotary_cos is not supported"),
        ("orphan", "comment", "# of a mask looked at at once", "# mask elements inspected per chunk"),
        ("so-many", "help", "print so many of the likeliest classes", "v must have as many heads as k"),
        ("let", "message", "it is too long; let it be shorter", "it is too long; pass a shorter text"),
    ],
)
def test_a_pattern_finds_the_habit_and_leaves_plain_text_alone(name, kind, bad, good):
    pattern = PATTERNS[name]
    assert kind in pattern.kinds.split()
    assert pattern.regex.search(bad)
    assert not pattern.regex.search(good)


def test_every_pattern_reads_known_kinds():
    for pattern in PATTERNS.values():
        assert set(pattern.kinds.split()) <= set(KINDS)


def test_code_is_no_prose():
    assert without_code("Say `told`.\n\n>>> told(1)\n'told'\n\nEnd.").split() == ["Say", "`code`.", "End."]
    assert "told" not in without_code("```\ntold\n```\n")


def test_each_kind_of_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.prose.ROOT", tmp_path)
    path = tmp_path / "src" / "regard" / "lens" / "example.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        '"""A docstring."""\n'
        "x: Annotated[int, 'a field']  # a comment\n"
        "y = Option(help=f'help of {x} things')\n"
        "raise ValueError(f'a message about {x} and ' 'more')\n",
        encoding="utf8",
    )
    assert sorted((text.line, text.kind, text.text) for text in source_texts(path)) == [
        (1, "docstring", "A docstring."),
        (2, "comment", "# a comment"),
        (2, "help", "a field"),
        (3, "help", "help of {} things"),
        (4, "message", "a message about {} and more"),
    ]
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```\ncode\n```\n\nTwo\nlines.\n", encoding="utf8")
    assert [(text.line, text.text) for text in page_texts(page)] == [(1, "# Title"), (7, "Two\nlines.\n")]
    assert Text("page", Path("docs/book/x.md"), 1, "").room == "docs"
    assert Text("message", Path("src/regard/lens/x.py"), 1, "").room == "lens"
