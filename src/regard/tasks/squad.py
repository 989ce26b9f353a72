"""Answers judged as SQuAD judges them: what counts is neither case, punctuation, articles nor spaces."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from .metrics import Measured

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def judged(answers: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, Measured]:
    """`f1` and `exact`, the percentages of Rajpurkar et al. 2016: each answer by the gold one it is nearest to.

    >>> for name, measured in judged(["the Eiffel tower", "1889"], [["Eiffel Tower"], ["in 1889", "May 1889"]]).items():
    ...     print(name, measured)
    f1 83.33  SQuAD, 2 questions
    exact 50.00  SQuAD, 2 questions

    No gold answers mean that the question has none, which an empty answer says. Where there are such questions, f1
    of the others is `possible`, and the percentage of these that were left unanswered is `impossible`.
    """
    if len(answers) != len(gold) or not gold:
        raise ValueError(
            f"answers must be one for each of one or more questions, got {len(answers)} answers and {len(gold)} "
            "questions"
        )
    f1 = [max(_f1(answer, one) for one in some or [""]) for answer, some in zip(answers, gold, strict=True)]
    exact = [max(_exact(answer, one) for one in some or [""]) for answer, some in zip(answers, gold, strict=True)]
    found = {"f1": _mean(f1), "exact": _mean(exact)}
    with_answer = [value for value, some in zip(f1, gold, strict=True) if some]
    without = [value for value, some in zip(exact, gold, strict=True) if not some]
    if without:
        found["impossible"] = _mean(without)
        if with_answer:
            found["possible"] = _mean(with_answer)
    return found


def normalized(answer: str) -> str:
    """What of an answer counts.

    >>> normalized("The  Eiffel-Tower, a tower.")
    'eiffeltower tower'
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def _exact(answer: str, gold: str) -> float:
    return float(normalized(answer) == normalized(gold))


def _f1(answer: str, gold: str) -> float:
    """The harmonic mean of precision and recall over words, each as often as it comes."""
    a, b = normalized(answer).split(), normalized(gold).split()
    if not a or not b:
        return float(a == b)
    return 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))


def _mean(values: Sequence[float]) -> Measured:
    return Measured(100 * sum(values) / len(values), f"SQuAD, {len(values):,} questions")
