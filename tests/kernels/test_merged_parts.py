"""Outputs over two parts of the keys, merged by one kernel."""

from __future__ import annotations

import pytest
import torch

from regard import merge
from regard.kernels.merged_parts import merge_two


def parts(b, h, i, e, dtype, device):
    """Two outputs and their log-sum-exps, in memory as `b i h e`; some rows see no key in one part, some in none."""
    outs = [torch.randn(b, i, h, e, dtype=dtype, device=device).transpose(1, 2) for _ in range(2)]
    lses = [torch.randn(b, h, i, device=device) * 5 for _ in range(2)]
    lses[0][:, 0, :2], lses[1][:, 0, 1:3] = -torch.inf, -torch.inf
    outs[0][:, 0, :2] = torch.nan  # whatever a kernel leaves there
    return outs, lses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("b", "h", "i", "e"), [(1, 1, 7, 1), (2, 3, 63, 20), (1, 2, 33, 64)])
def test_the_kernel_merges_as_the_definition(b, h, i, e, dtype, device):
    outs, lses = parts(b, h, i, e, dtype, device)
    want, total = merge([x.double() for x in outs], [x.double() for x in lses])
    theirs, _ = merge(outs, lses)
    out, lse = merge_two(*outs, *lses, dtype)
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    bound = 2 * (theirs.double() - want).abs().max() + torch.finfo(dtype).eps
    assert (out.double() - want).abs().max() <= bound
    torch.testing.assert_close(lse.double(), total, atol=1e-5, rtol=1e-5)


def test_three_parts_are_merged_one_after_the_other(device):
    outs, lses = parts(1, 2, 9, 16, torch.bfloat16, device)
    want, total = merge([*outs, outs[1]], [*lses, lses[1] + 1])
    out, lse = merge_two(*outs, *lses, torch.float32)
    out, lse = merge_two(out, outs[1], lse, lses[1] + 1, torch.bfloat16)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, total)


def test_no_queries_are_merged_to_none(device):
    outs, lses = parts(1, 2, 0, 16, torch.float32, device)
    out, lse = merge_two(*outs, *lses, torch.float32)
    assert out.shape == (1, 2, 0, 16)
    assert lse.shape == (1, 2, 0)
