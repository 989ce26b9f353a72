"""A function of one pair of FlexAttention, evaluated over rows of pairs."""

from __future__ import annotations

import pytest
import torch

from tests.lens.flex_layers import FlexLayer, blocks, flex_inputs
from tests.lens.kernel_layers import capture_one

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def test_a_mask_mod_that_indexes_in_turn_is_evaluated_by_pairs():
    lengths = torch.tensor([[4], [7]])
    mask = blocks(lambda b, h, i, j: j < lengths[b][0], n=7, batch=2)
    q, k, v = flex_inputs(n=7, m=7)
    A, out = capture_one(FlexLayer(block_mask=mask), q, k, v)
    torch.testing.assert_close(A @ v, out)
