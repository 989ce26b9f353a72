"""Generation: terms of several calls compared by value."""

import pytest
import torch

from regard import Alibi, Causal, Padding, Relative, Rule, Window
from regard.lens.recording.generation import equal_terms

LENGTHS = torch.tensor([3, 4])


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (None, None, True),
        (Causal(), None, False),
        (Causal() & Window(4), Causal() & Window(4), True),
        (Causal() & Window(4), Causal() & Window(5), False),
        (Padding(LENGTHS), Padding(LENGTHS.clone()), True),
        (Padding(LENGTHS), Padding(LENGTHS + 1), False),
        (Padding(LENGTHS), Padding(LENGTHS.int()), False),
        (Causal() & Padding(LENGTHS), Causal() & Padding(LENGTHS.clone()), True),
        (Relative.t5(torch.ones(2, 32)), Relative.t5(torch.ones(2, 32)), True),
        (Alibi(4), Alibi(8), False),
    ],
)
def test_terms_are_equal_if_their_fields_and_tensors_are(a, b, equal):
    assert equal_terms(a, b) is equal
    assert equal_terms(b, a) is equal


def test_two_functions_of_one_name_are_not_equal():
    first, second = Rule(lambda b, h, i, j: j <= i), Rule(lambda b, h, i, j: j > i)
    assert repr(first) == repr(second)
    assert not equal_terms(first, second)
    assert not equal_terms(Causal() & first, Causal() & second)
    assert equal_terms(first, Rule(first.fn))
