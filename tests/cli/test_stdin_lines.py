"""Standard input line by line: an output for each line, in its place, and the lines that were kept."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest

from regard.cli.decoding_flags import Search
from regard.cli.stdin_lines import write_lines
from regard.tasks.pairs import Draft
from regard.tasks.translation import Translator
from tests.cli.commands import SOURCE, well

LINES = "".join(f"{line}\n" for line in SOURCE)


def test_every_line_has_a_translation_in_its_place(translator):
    printed = well("translate", translator, "--beam", 2, stdin=LINES).lines
    found = Translator.load(translator).translate(SOURCE, beam=2)
    assert printed == [" ".join(one.text.splitlines()) for one in found]


def test_no_input_is_no_output(translator):
    assert well("translate", translator).out == ""


def test_n_best_lists_have_numbers_and_scores(translator):
    printed = well("translate", translator, "--beam", 3, "--nbest", 3, stdin="ein Haus\ndas\n").lines
    assert len(printed) == 6
    rows = [re.fullmatch(r"(\d) \|\|\| (.*) \|\|\| (-\d+\.\d{4})", line) for line in printed]
    assert [row[1] for row in rows] == ["0"] * 3 + ["1"] * 3
    scores = [float(row[3]) for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)


class Shouter:
    """A writer that returns each line in capitals; it ends no line of more than two words, and reads no more."""

    longest, limit = 4, 2

    def n_best(self, lines, *, n, show, **settings):
        show(len(lines), len(lines))
        return [
            [
                SimpleNamespace(text=line.upper() + "!\n" * n, score=-float(n), tokens=(n,), finished=len(line) < 8)
                for n in range(n)
            ]
            for line in lines
        ]

    def too_long(self, lines):
        return [len(line.split()) > self.limit for line in lines]


def written(monkeypatch, text, search, *, keep=False, attention=None):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return write_lines(Shouter(), search, doing="shouting", what="shouts", attention=attention, keep=keep)


def test_the_best_output_of_each_line_is_kept_as_it_was_printed(monkeypatch, capsys):
    kept = written(monkeypatch, "one\ntwo words\n", Search(beam=2, nbest=2), keep=True)
    assert capsys.readouterr().out.splitlines() == [
        "0 ||| ONE ||| -0.0000",
        "0 ||| ONE! ||| -1.0000",
        "1 ||| TWO WORDS ||| -0.0000",
        "1 ||| TWO WORDS! ||| -1.0000",
    ]
    assert kept == [Draft("one", "ONE", (0,)), Draft("two words", "TWO WORDS", (0,))]
    assert written(monkeypatch, "one\n", Search(beam=1)) == []


def test_lines_are_numbered_through_and_outputs_that_were_cut_counted_over_all_chunks(monkeypatch, capsys):
    monkeypatch.setattr("regard.cli.stdin_chunks.LINES_PER_CHUNK", 2)
    written(monkeypatch, "a b c d e\nb\nthree long words\nd\n", Search(beam=1, max_length=3, nbest=1))
    ended = capsys.readouterr()
    assert ended.out.splitlines() == ["A B C D E", "B", "THREE LONG WORDS", "D"]
    assert ended.err.splitlines() == [
        "2 of 4 shouts reached the maximum of 3 tokens before they ended; raise it with --max-length",
        "2 of 4 documents have more than 2 tokens; only the first 2 were read",
    ]
    written(monkeypatch, "a\nb\nc\n", Search(beam=2, nbest=2))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "0", "1", "1", "2", "2"]


def test_more_lines_than_a_picture_holds_are_refused_before_they_are_written(monkeypatch, capsys, tmp_path):
    with pytest.raises(ValueError, match=r"--attention a\.png is a picture of one example, got more"):
        written(monkeypatch, "one\ntwo\n", Search(beam=1), attention=tmp_path / "a.png")
    assert capsys.readouterr().out == ""
