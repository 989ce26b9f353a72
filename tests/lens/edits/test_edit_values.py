"""Edits as values: they print as their source, compare by value, and refuse what is no edit."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from regard.lens import Boost, Cut, Only, Scale, Temperature, generated, words
from regard.lens.edits.edit_values import Edit, constant


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Cut(), ValueError, "Cut must have queries or keys"),
        (lambda: Cut(keys="cat"), TypeError, "Cut keys must be positions of tokens, got 'cat'"),
        (lambda: Cut(keys=[0.5]), TypeError, "Cut keys must be positions of tokens"),
        (lambda: Cut(keys=slice(3, 0, -1)), ValueError, "a step of 1 or more"),
        (lambda: Cut(keys=words(["a", "b"])), TypeError, r"must name a group: Groups\(\.\.\.\)\['a'\]"),
        (lambda: Scale([0.5], 0), TypeError, "Scale heads must be whole numbers, got 0.5"),
        (lambda: Scale("0", 0), TypeError, "Scale heads must be a list of their numbers"),
        (lambda: Temperature(0, 0), ValueError, "Temperature factor must be above 0"),
        (lambda: Boost(0, "2"), TypeError, "Boost amount"),
    ],
)
def test_values_that_are_no_edit_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_edit_prints_as_its_source():
    sources = [
        "Cut(queries=-1, keys=slice(0, 4), heads=(3,))",
        "Cut(keys=generated)",
        "Boost((2, 3), 2.0, queries=slice(0, None, 2))",
        "Temperature(None, 0.5)",
        "Scale((0, 3), 0)",
        "Only((1, 2))",
    ]
    names = {"Cut": Cut, "Boost": Boost, "Temperature": Temperature, "Scale": Scale, "Only": Only}
    for source in sources:
        value = eval(source, names | {"generated": generated, "slice": slice})
        assert repr(value) == source
        assert value == eval(repr(value), names | {"generated": generated})
    assert repr(Cut(keys=words)) == "Cut(keys=words)"


def test_an_edit_without_a_change_changes_nothing():
    assert Edit().change(None, None) is None
    assert Edit().factors(2) == [1.0, 1.0]
    assert Only([2, 0, 2]).head_numbers() == (0, 2)
    assert Scale(None, 3).factors(2) == [3.0, 3.0]


def test_numbers_that_are_kept_are_those_of_no_trace():
    numbers = (0.5, 17.25)
    with FakeTensorMode():
        assert isinstance(constant(numbers, torch.float32, torch.device("cpu")), FakeTensor)
    with torch.inference_mode():
        kept = constant(numbers, torch.float32, torch.device("cpu"))
    assert kept.tolist() == [*numbers]
    assert not kept.is_inference()
    assert constant(numbers, torch.float32, torch.device("cpu")) is kept
