"""Axis: every neighbour in one bin, in order, whichever way they are shared out."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.ops.blocks.pool_bins import Axis, area

CPU = torch.device("cpu")
NUMBERS = st.integers(1, 3000)


def counted(axis: Axis) -> list[int]:
    return torch.bincount(axis.ids(CPU)[0], minlength=axis.count).tolist()


@given(n=NUMBERS, most=st.integers(1, 600))
def test_cells_are_the_smallest_powers_of_two_that_are_few_enough(n, most):
    axis = Axis.cells(n, most)
    assert axis.count <= most
    assert axis.size is not None
    assert axis.size & (axis.size - 1) == 0
    assert axis.size == 1 or -(-n // (axis.size // 2)) > most
    assert counted(axis)[:-1] == [axis.size] * (axis.count - 1)
    assert counted(axis)[-1] == axis.last


@given(n=NUMBERS, count=st.integers(1, 600))
def test_even_bins_differ_by_one(n, count):
    count = min(n, count)
    axis = Axis.even(n, count)
    held = counted(axis)
    assert max(held) - min(held) <= 1
    assert held[-1] == axis.last
    assert axis.ids(CPU)[0].tolist() == [r * count // n for r in range(n)]
    assert axis.is_uniform is (n % count == 0)


@given(n=NUMBERS, most=st.integers(1, 600), even=st.booleans())
def test_edges_are_where_bins_begin(n, most, even):
    axis = Axis.even(n, min(n, most)) if even else Axis.cells(n, most)
    assert axis.edges().diff().tolist() == counted(axis)


def test_an_axis_of_nothing_has_one_bin():
    for axis in (Axis.cells(0, 512), Axis.even(0, 1)):
        assert (axis.count, axis.last, axis.ids(CPU).shape) == (1, 0, (1, 0))
        assert int(area(axis, axis, CPU)) == 1


def test_the_area_of_a_pair_of_bins_is_how_many_entries_it_holds():
    assert area(Axis.even(12, 4), Axis.even(10, 5), CPU) == 6
    assert area(Axis.cells(5, 4), Axis.even(7, 2), CPU).tolist() == [[8, 6], [8, 6], [4, 3]]
