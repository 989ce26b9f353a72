"""Buckets: examples of similar length together, within the budget, and shared evenly."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from regard.data.buckets import buckets, share_evenly
from tests.data.numbered_examples import flat


@given(lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60), tokens=st.integers(30, 200))
def test_buckets_hold_each_example_once_within_the_budget(lengths, tokens):
    cut = buckets(lengths, tokens=tokens)
    assert sorted(flat(cut)) == list(range(len(lengths)))
    assert all(len(bucket) * max(max(lengths[n]) for n in bucket) <= tokens for bucket in cut)
    # Two neighbours that fit together are together.
    for one, other in pairwise(cut):
        assert (len(one) + 1) * max(lengths[other[0]]) > tokens


@given(sizes=st.lists(st.integers(1, 9), max_size=20), ranks=st.integers(1, 8))
def test_sharing_loses_only_what_cannot_be_shared(sizes, ranks):
    numbers = iter(range(1000))
    cut = [[next(numbers) for _ in range(size)] for size in sizes]
    even, spare = share_evenly(cut, ranks)
    assert len(even) % ranks == 0
    assert sorted(flat(even) + spare) == sorted(flat(cut))
    assert len(spare) < ranks
    if spare:
        assert all(len(bucket) == 1 for bucket in even)
    assert all(any(set(bucket) <= set(old) for old in cut) for bucket in even)
