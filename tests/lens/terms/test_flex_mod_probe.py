"""A function of one pair of FlexAttention, evaluated over rows of pairs."""

from __future__ import annotations

import pytest
import torch

from regard.lens.terms.flex_mod_probe import all_at_once, rows_of
from tests.lens.flex_layers import FlexLayer, blocks, flex_inputs
from tests.lens.kernel_layers import capture_one

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def test_a_mask_mod_that_indexes_in_turn_is_evaluated_by_pairs():
    lengths = torch.tensor([[4], [7]])
    mask = blocks(lambda b, h, i, j: j < lengths[b][0], n=7, batch=2)
    q, k, v = flex_inputs(n=7, m=7)
    A, out = capture_one(FlexLayer(block_mask=mask), q, k, v)
    torch.testing.assert_close(A @ v, out)


SHAPE = (2, 3, 4, 5)
TABLE = torch.arange(2 * 3 * 4 * 5).view(SHAPE)


def pairs(mod, shape=SHAPE):
    """b h i j: the function of each pair, one by one."""
    index = [torch.arange(n) for n in shape]
    value = [[[[mod(b, h, i, j) for j in index[3]] for i in index[2]] for h in index[1]] for b in index[0]]
    return torch.tensor(value)


@pytest.mark.parametrize(
    ("mod", "broadcast"),  # at most 4 indices of each dim are probed
    [
        (lambda b, h, i, j: i >= j, (1, 1, 4, 4)),
        (lambda b, h, i, j: (i >= j) & (h > 1), (1, 3, 4, 4)),
        (lambda b, h, i, j: b == 1, (2, 1, 1, 1)),
        (lambda b, h, i, j: TABLE[b, h, i, j], (2, 3, 4, 4)),
        (lambda b, h, i, j: TABLE[b][h][i][j], None),  # indexing in turn takes one pair at a time
        (lambda b, h, i, j: TABLE[0][0][i][j] + 0 * b, None),
    ],
)
def test_rows_are_the_function_of_each_pair(mod, broadcast):
    device = torch.device("cpu")
    assert all_at_once(mod, SHAPE, device) == broadcast
    rows = rows_of(mod, SHAPE, device)
    whole = torch.cat([rows.block(start, start + 2) for start in (0, 2)], 2)
    assert rows.shape == whole.shape
    assert torch.equal(whole.expand(SHAPE), pairs(mod))


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_a_function_of_no_pairs_has_empty_rows(shape):
    rows = rows_of(lambda b, h, i, j: i >= j, shape, torch.device("cpu"))
    assert rows.block(0, shape[2]).expand(shape).numel() == 0
