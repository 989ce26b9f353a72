"""Toy tasks: each target is right by definition."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import Arithmetic, Copy, Recall, Reverse, Sort


@given(seed=st.integers(0, 10**6), longest=st.integers(1, 20))
def test_letter_tasks_are_what_they_say(seed, longest):
    for make, rule in ((Copy, list), (Reverse, lambda letters: letters[::-1]), (Sort, sorted)):
        source, target = make(longest=longest)(random.Random(seed))
        assert target.split(" ") == rule(source.split(" "))
        assert 1 <= len(source.split(" ")) <= longest


@given(seed=st.integers(0, 10**6), longest=st.integers(1, 26))
def test_recall_asks_for_a_value_it_was_told(seed, longest):
    source, target = Recall(longest=longest)(random.Random(seed))
    told, asked = source.split(" ? ")
    cells = told.split(" ")
    assert len(cells) == 2 * len(set(cells[::2])) <= 2 * longest
    assert dict(zip(cells[::2], cells[1::2], strict=True))[asked] == target


@given(seed=st.integers(0, 10**6), digits=st.integers(1, 5), operations=st.sampled_from(["+", "-", "*", "+-", "+-*"]))
def test_arithmetic_is_right(seed, digits, operations):
    source, target = Arithmetic(digits=digits, operations=operations)(random.Random(seed))
    text = source.replace(" ", "")
    sign = next(sign for sign in operations if sign in text[1:])
    a, b = map(int, text.split(sign))
    assert max(a, b) < 10**digits
    assert int(target.replace(" ", "")) == {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert all(len(symbol) == 1 for symbol in (source + " " + target).split(" "))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Copy(shortest=3, longest=2), "shortest and longest must be at least 1, in that order, got 3 and 2"),
        (lambda: Sort(shortest=0), "must be at least 1, in that order, got 0 and 12"),
        (lambda: Recall(longest=27), "shortest and longest must lie in 1 to 26, in that order, got 1 and 27"),
        (lambda: Arithmetic(digits=0), "digits must be at least 1, got 0"),
        (lambda: Arithmetic(operations="+/"), r"operations must be one or more of '\+', '-' and '\*', got '\+/'"),
        (lambda: Arithmetic(operations=""), "operations must be one or more of"),
    ],
)
def test_tasks_that_cannot_be_say_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
