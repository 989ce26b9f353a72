"""The flags of a search: what contradicts itself is refused, and outputs that were cut are counted."""

from __future__ import annotations

import pytest

from regard.cli.decoding_flags import Search
from regard.tasks.translation import Translator
from tests.cli.commands import SOURCE, well

LINES = "".join(f"{line}\n" for line in SOURCE)


def test_translations_that_do_not_end_are_counted(translator):
    loaded = Translator.load(translator)
    for flags, most in (((), loaded.longest * 3 // 2 + 10), (("--max-length", 2), 2)):
        ended = well("translate", translator, "--beam", 1, *flags, stdin=LINES)
        cut = sum(not one.finished for one in loaded.translate(SOURCE, beam=1, max_length=most))
        told = f"{cut} of 8 translations reached the maximum of {most} tokens before they ended; raise"
        assert (told in ended.err) == (cut > 0)
    assert cut > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"beam": 0}, "--beam must be at least 1, got 0"),
        ({"beam": 4, "nbest": 0}, "--nbest must be at least 1, got 0"),
        ({"beam": 4, "min_length": -1}, "--min-length must be at least 0, got -1"),
        ({"beam": 4, "max_length": 0}, "--max-length must be at least 1, got 0"),
        ({"beam": 4, "no_repeat": 0}, "--no-repeat must be at least 1, got 0"),
        ({"beam": 4, "penalty": 50.5}, "--length-penalty must be between -50 and 50, got 50.5; 0.6 is common"),
        ({"beam": 4, "penalty": float("nan")}, "--length-penalty must be between -50 and 50, got nan"),
        ({"beam": 2, "nbest": 3}, "--nbest must be at most --beam, got --nbest 3 and --beam 2; pass --beam 3 or more"),
        (
            {"beam": 2, "min_length": 9, "max_length": 8},
            "--min-length must be at most --max-length, got --min-length 9 and --max-length 8; pass --max-length 9",
        ),
    ],
)
def test_flags_that_no_search_can_have_are_refused(flags, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Search(**flags)


def test_the_widest_flags_that_a_search_can_have_are_taken():
    flags = {"beam": 2, "nbest": 2, "penalty": -50.0, "min_length": 8, "max_length": 8, "no_repeat": 1}
    assert Search(**flags).settings == {
        "n": 2, "beam": 2, "alpha": -50.0, "min_length": 8, "max_length": 8, "no_repeat": 1,
        "coverage": 0.0,
    }  # fmt: skip


def test_outputs_that_were_cut_are_counted_with_the_limit_that_cut_them(capsys):
    Search(beam=1).print_unfinished("summaries", 1_200, 3_000, longest=20)
    Search(beam=1, max_length=7).print_unfinished("captions", 1, 1, longest=20)
    Search(beam=1).print_unfinished("captions", 0, 3, longest=20)
    end = "tokens before they ended; raise it with --max-length"
    assert capsys.readouterr().err.splitlines() == [
        f"1,200 of 3,000 summaries reached the maximum of 40 {end}",
        f"1 of 1 captions reached the maximum of 7 {end}",
    ]
