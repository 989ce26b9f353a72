"""shrink and resample: means of cells, in proportion to what each new cell covers."""

from itertools import pairwise

import pytest
import torch

from regard.ops.blocks.pool_bins import Axis
from regard.ops.blocks.resample import resample, shrink


def mean_over(cells, edges, start, stop):
    """The mean of a step function between two points, summed step by step."""
    covered = [max(0.0, min(stop, b) - max(start, a)) for a, b in pairwise(edges)]
    return sum(x * length for x, length in zip(cells, covered, strict=True)) / (stop - start)


def test_small_maps_are_means():
    cells = torch.rand(2, 96, 100)
    small = shrink(cells, 48)
    assert small.shape == (2, 48, 48)
    assert torch.allclose(small.mean((1, 2)), cells.mean((1, 2)))
    assert shrink(cells[:, :5, :7], 48).shape == (2, 5, 7)
    halves = resample(cells, 1, torch.arange(97), torch.arange(49) * 2)
    assert torch.allclose(halves, cells.unflatten(1, (-1, 2)).mean(2))


def test_nan_stays_in_its_cell_of_small_maps():
    cells = torch.rand(96, 96)
    cells[10] = torch.nan
    found = shrink(cells, 48)
    assert found.isnan().all(1).nonzero().flatten().tolist() == [5]
    assert torch.equal(found[6:], shrink(cells.nan_to_num(), 48)[6:])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_new_cell_is_the_mean_of_the_step_function_between_its_edges(dim):
    edges, new_edges = [0, 1, 4, 6, 13], [0.0, 0.5, 3.25, 4.0, 12.0, 13.0]
    cells = torch.randn(4, 4, 4).double()
    found = resample(cells, dim, torch.tensor(edges), torch.tensor(new_edges))
    lines = cells.movedim(dim, -1).reshape(-1, 4).tolist()
    want = torch.tensor([[mean_over(line, edges, *span) for span in pairwise(new_edges)] for line in lines]).double()
    torch.testing.assert_close(found.movedim(dim, -1).reshape(-1, 5), want)


def test_the_means_of_uneven_bins_weigh_each_by_its_size():
    axis = Axis.cells(10, 4)  # bins of 4, 4 and 2
    found = shrink(torch.tensor([[1.0, 2.0, 6.0]]), 2, [Axis.even(1, 1), axis])
    torch.testing.assert_close(found, torch.tensor([[(4 * 1 + 1 * 2) / 5, (3 * 2 + 2 * 6) / 5]]))


def test_a_sum_of_many_half_precision_cells_is_not_rounded_on_the_way():
    cells = torch.full((1, 5000), 0.1, dtype=torch.bfloat16)
    found = shrink(cells, 3)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, cells[:, :3])


def test_a_map_of_nothing_is_left_as_it_is():
    cells = torch.zeros(2, 0, 100)
    assert shrink(cells, 48) is cells
