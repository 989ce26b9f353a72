"""Dates in many languages to ISO 8601: a translation task that needs no download (after Raffel's and Ng's)."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import NamedTuple

from babel import Locale
from babel.dates import format_date, format_skeleton

# fmt: off
LOCALES = (
    "en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "fi", "pl", "cs", "hu", "ro", "tr", "ru", "uk",
    "el", "id", "vi", "ja", "ko", "zh", "hi", "he", "ar",
)
# fmt: on
FORMATS = ("full", "long", "medium", "yMd")
UNSEEN_LOCALES = ("af", "ca", "nb", "sk")
UNSEEN_FORMATS = ("yMMMEd",)
PARTS = ("train", "test", "locales", "formats")
FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)


class Dated(NamedTuple):
    """A date in a local format, the same in ISO 8601, its locale and its format."""

    source: str
    target: str
    locale: str
    format: str


@dataclass(frozen=True, kw_only=True)
class Dates:
    """Dates from 1900 to 2099 as `locales` write them, in words and in numbers.

    >>> from regard.data import Generated
    >>> Generated(Dates(locales=("de",)), size=3)[1]
    Dated(source='17. Mai 2087', target='2087-05-17', locale='de', format='long')

    One day in ten is held out for testing. `part="train"` draws the others, `"test"` the held-out days, `"locales"` the
    held-out days in languages, and `"formats"` in a format, that training never contains. Locale data is the Unicode
    consortium's, through babel. Each text means exactly one day: numeric formats that begin with the month are left
    out, since elsewhere they begin with the day, and every year has four digits.
    """

    part: str = "train"
    locales: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {self.part!r}")
        for locale in self._locales:
            if locale not in LOCALES + UNSEEN_LOCALES:
                raise ValueError(f"unknown locale {locale!r}; choose from {', '.join(LOCALES + UNSEEN_LOCALES)}")
        for form in self._formats:
            if form not in FORMATS + UNSEEN_FORMATS:
                raise ValueError(f"unknown format {form!r}; choose from {', '.join(FORMATS + UNSEEN_FORMATS)}")
        if not any(is_unambiguous(locale, form) for locale in self._locales for form in self._formats):
            raise ValueError(f"no format of {self.formats} is unambiguous in {self.locales}; add 'long'")

    def __call__(self, rng: random.Random) -> Dated:
        while True:
            locale, form = rng.choice(self._locales), rng.choice(self._formats)
            day = date.fromordinal(rng.randint(FIRST.toordinal(), LAST.toordinal()))
            if is_held_out(day) == (self.part != "train") and is_unambiguous(locale, form):
                return Dated(write(day, locale, form), day.isoformat(), locale, form)

    @property
    def _locales(self) -> tuple[str, ...]:
        return self.locales or (UNSEEN_LOCALES if self.part == "locales" else LOCALES)

    @property
    def _formats(self) -> tuple[str, ...]:
        return self.formats or (UNSEEN_FORMATS if self.part == "formats" else FORMATS)


def is_held_out(day: date) -> bool:
    """Whether a day is held out for testing: one in ten, by a fixed hash."""
    return zlib.crc32(day.isoformat().encode()) % 10 == 0


@cache
def is_unambiguous(locale: str, form: str) -> bool:
    """Whether a locale has this format and it is unambiguous."""
    data = Locale.parse(locale)
    if not form.startswith("y"):
        return form in data.date_formats
    pattern = data.datetime_skeletons.get(form)
    return pattern is not None and not (form == "yMd" and pattern.pattern.startswith("M"))


def write(day: date, locale: str, form: str) -> str:
    """Write a day in a locale; `form` is full, long, medium, or one of the Unicode consortium's skeletons."""
    if form.startswith("y"):
        return format_skeleton(form, day, fuzzy=False, locale=locale)
    return format_date(day, form, locale=locale)
