"""Reports of probable mistakes in the data of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..data.row_checks import Key, RowChecks
from .setup import Start

MIN_LINE = 40  # characters of a line of text that is no coincidence in two texts


def report_rows(start: Start, keys: Iterable[Key], valid: Iterable[Key] | None, what: str) -> None:
    """Print the numbers of empty, repeated and shared examples; `what` is their plural noun, such as pairs."""
    if start.group.leads:
        checks = RowChecks.of(keys, others=() if valid is None else valid)
        for line in checks.lines(f"training {what}", f"validation {what}"):
            start.say(line)


def report_images(start: Start, images: Any, valid: Any | None) -> None:
    """Print the numbers of images that repeat, and of validation images that are also in the training data.

    Images are compared by their files or pixels; data without `digests` is not checked.
    """
    if start.group.leads and all(hasattr(data, "digests") for data in (images, valid) if data is not None):
        others = () if valid is None else ((digest,) for digest in valid.digests())
        checks = RowChecks.of(((digest,) for digest in images.digests()), others=others)
        for line in checks.lines("training images", "validation images"):
            start.say(line.replace("have an input that is also", "are also"))


def report_lines(start: Start, lines: Iterable[str], valid: Iterable[str] | None) -> None:
    """Print the number of validation lines that are also in the training text; short lines are left out."""
    if start.group.leads and valid is not None:
        keys, others = (((line,) for line in text if len(line) >= MIN_LINE) for text in (lines, valid))
        checks = RowChecks.of(keys, others=others)
        if checks.leaked.any():
            start.say(
                f"{checks.leaked.sum():,} of {len(checks.leaked):,} validation lines of at least {MIN_LINE} characters "
                "are also in the training text"
            )


def question_key(question: Any) -> Key:
    """Return the document with its question, and the question."""
    return f"{question.context}\0{question.question}", question.question
