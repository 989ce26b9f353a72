"""Dates: written as people write them, one day to a text, and some days kept for testing."""

import datetime
import random

import numpy as np
import pytest

from regard.data import Dates
from regard.data.dates import (
    FORMATS,
    LOCALES,
    PARTS,
    UNSEEN_FORMATS,
    UNSEEN_LOCALES,
    is_held_out,
    is_unambiguous,
    write,
)


def test_dates_speak_many_languages_in_several_formats():
    assert len({locale.split("_")[0] for locale in LOCALES}) >= 16
    for locale in LOCALES + UNSEEN_LOCALES:
        texts = {write(datetime.date(2003, 2, 25), locale, form) for form in FORMATS if is_unambiguous(locale, form)}
        assert len(texts) >= 3
        assert is_unambiguous(locale, UNSEEN_FORMATS[0])


def test_each_date_text_means_one_day():
    meaning = {}
    forms = [(locale, form) for locale in LOCALES + UNSEEN_LOCALES for form in FORMATS + UNSEEN_FORMATS]
    forms = [pair for pair in forms if is_unambiguous(*pair)]
    for year, step in ((2003, 1), (1903, 11), (2012, 11)):
        for n in range(0, 365, step):
            day = datetime.date(year, 1, 1) + datetime.timedelta(n)
            for locale, form in forms:
                assert meaning.setdefault(write(day, locale, form), day) == day


def test_dates_for_testing_are_never_trained_on():
    parts = {part: [Dates(part=part)(random.Random(n)) for n in range(400)] for part in PARTS}
    for part, made in parts.items():
        assert {is_held_out(datetime.date.fromisoformat(one.target)) for one in made} == {part != "train"}
    assert {one.locale for one in parts["train"]} == {one.locale for one in parts["test"]} == set(LOCALES)
    assert {one.locale for one in parts["locales"]} == set(UNSEEN_LOCALES)
    assert {one.format for one in parts["formats"]} == set(UNSEEN_FORMATS)
    assert not set(LOCALES) & set(UNSEEN_LOCALES)
    assert {one.format for one in parts["train"]} == set(FORMATS)
    share = np.mean([is_held_out(datetime.date(2000, 1, 1) + datetime.timedelta(n)) for n in range(3000)])
    assert 0.08 < share < 0.12


def test_dates_are_written_as_people_do():
    day = datetime.date(2003, 2, 5)
    assert write(day, "de", "full") == "Mittwoch, 5. Februar 2003"
    assert write(day, "fr", "yMd") == "05/02/2003"
    assert write(day, "ja", "long") == "2003年2月5日"
    made = Dates(locales=("fr",), formats=("long",))(random.Random(0))
    assert (made.locale, made.format) == ("fr", "long")
    assert made.source == write(datetime.date.fromisoformat(made.target), "fr", "long")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Dates(part="dev"), "part must be one of train, test, locales, formats, got 'dev'"),
        (lambda: Dates(locales=("tlh",)), "unknown locale 'tlh'; choose from en, en_GB"),
        (lambda: Dates(formats=("short",)), "unknown format 'short'; choose from full, long"),
        (lambda: Dates(locales=("en",), formats=("yMd",)), "no format of .* is unambiguous in .*; add 'long'"),
    ],
)
def test_dates_that_cannot_be_say_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
