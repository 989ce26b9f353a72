"""Commands run in this process: what they print, and how they end."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from regard.cli import main

# A few sentences, and flags that make a run of a second.
SOURCE = ["ein Haus", "ein Hund", "das Haus", "der Hund", "ein kleines Haus", "ein kleiner Hund", "das", "kleines"]
TARGET = ["a house", "a dog", "the house", "the dog", "a small house", "a small dog", "the", "small"]
SMALL = ["--dim", 16, "--steps", 4, "--save-every", 2, "--evaluate-every", 2, "--log-every", 1]
# Questions in the format of SQuAD: about each of two texts one that has an answer, and one that has none.
TEXTS = [("The tower opened in 1889.", "1889"), ("The bridge  is red,\tor blue.", "red,\tor blue")]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": text,
                    "qas": [
                        {
                            "id": f"{n}a",
                            "question": "When or what?",
                            "answers": [{"text": answer, "answer_start": text.index(answer)}],
                        },
                        {"id": f"{n}b", "question": "Who is it?", "is_impossible": True, "answers": []},
                    ],
                }
                for n, (text, answer) in enumerate(TEXTS)
            ]
        }
    ]
}
# News, and what matters in them; most words come once.
NEWS = [f"The fox met {name} , who slept ." for name in ("Anna", "Bela", "Carl", "Dora", "Emil", "Fritz")]
HEADLINES = [" ".join(news.split()[2:4]) for news in NEWS]


class Ended(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def once(arguments: list[str]) -> list[str]:
    """The arguments without those of `SMALL` that come again later: a command takes each of these flags once."""
    small = {str(name) for name in SMALL[::2]}
    left = []
    for place, argument in enumerate(arguments):
        if argument in small and argument in arguments[place + 1 :]:
            continue
        if place and arguments[place - 1] in small and arguments[place - 1] in arguments[place:]:
            continue
        left.append(argument)
    return left


def run(*arguments: object, stdin: str | bytes = b"") -> Ended:
    """`regard` with these arguments, in this process."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(given))),
        mock.patch.dict("os.environ", {"COLUMNS": "200", "TERM": "dumb"}),
    ):
        try:
            main(once([str(argument) for argument in arguments]))
        except SystemExit as ended:
            return Ended(int(ended.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main must end the process")


def well(*arguments: object, stdin: str | bytes = b"") -> Ended:
    """The same, for a command that must succeed."""
    ended = run(*arguments, stdin=stdin)
    assert ended.code == 0, ended.err
    return ended
