"""Generated examples: the same for a seed, in any order and process."""

import pickle
import random

import numpy as np
import pytest

from regard.data import Arithmetic, Copy, Dates, Generated, Recall, Reverse, Scenes, Sort

MAKERS = [Copy(), Reverse(), Sort(), Recall(), Arithmetic(), Dates(), Scenes()]


def same(one, other):
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", MAKERS, ids=repr)
def test_examples_are_the_same_for_a_seed_in_any_order_and_process(make):
    made = Generated(make, size=20, seed=1)
    forward = [made[n] for n in range(20)]
    again = pickle.loads(pickle.dumps(Generated(make, size=20, seed=1)))
    assert all(same(again[n], forward[n]) for n in reversed(range(20)))
    assert all(same(a, b) for a, b in zip(made, forward, strict=True))
    assert same(made[-1], forward[19])
    assert not all(same(a, b) for a, b in zip(Generated(make, size=20, seed=2), forward, strict=True))


def test_examples_do_not_touch_the_global_generators():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    for make in MAKERS:
        Generated(make, size=1)[0]
    assert random.random() == expected


def test_sizes_that_cannot_be_say_why():
    for size in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"size must be a whole number of examples, at least 1, got"):
            Generated(Copy(), size=size)
    with pytest.raises(IndexError, match=r"there is no example 5: there are 5, counted from 0"):
        Generated(Copy(), size=5)[5]
    assert len(Generated(Copy(), size=10**12)) == 10**12
    assert Generated(Copy(), size=10**12)[10**12 - 1].source
