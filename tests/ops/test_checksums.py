"""Checksums change with the numbers of a tensor, and with their order."""

import pytest
import torch

from regard.ops.checksums import as_integers, row_and_column_sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8, torch.bool])
def test_bits_are_kept(dtype):
    x = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    assert torch.equal(as_integers(x).view(dtype), x)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4, 5)])
def test_another_number_or_order_changes_the_sums(shape):
    x = torch.randn(shape)
    known = row_and_column_sums(x)
    assert torch.equal(row_and_column_sums(x.clone()), known)
    other = x.clone()
    other.view(-1)[3] += 1e-6
    assert not torch.equal(row_and_column_sums(other), known)
    if len(shape) > 1:
        assert not torch.equal(row_and_column_sums(x.flip(-2)), known)
