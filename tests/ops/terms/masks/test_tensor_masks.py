"""Masks that read a tensor: centres in half precision, and centres that are no number."""

from __future__ import annotations

import pytest
import torch

from regard import Blocks, Documents, Near, Padding, weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_sees_one_key_at_radius_zero_whatever_the_dtype_of_its_centre(dtype):
    center = {torch.bfloat16: 300, torch.float16: 4096}[dtype]
    keys = torch.arange(center - 5, center + 6)
    seen = Near(torch.tensor([float(center)], dtype=dtype), 0)(*[torch.tensor(0)] * 3, keys)
    assert keys[seen].tolist() == [center]


def test_a_centre_that_is_nan_hides_its_own_row_only():
    center = torch.arange(300.0)
    center[7] = torch.nan
    q, k = torch.randn(2, 1, 1, 300, 4)
    rows = weights(q, k, mask=Near(center, 1)).dense()[0, 0].sum(-1)
    assert rows[7] == 0
    torch.testing.assert_close(rows[torch.arange(300) != 7], torch.ones(299))


def test_a_term_on_another_device_is_made_of_tensors_without_gradients():
    center = torch.arange(3.0, requires_grad=True)
    near = Near(center, 1.0).with_tensors(torch.device("cpu"), torch.float32)
    assert not near.center.requires_grad
    padding = Padding((3, 1)).with_tensors(torch.device("meta"), torch.float32)
    assert padding.keys.device.type == "meta"


def test_a_mask_of_a_tensor_draws_at_its_own_size_and_at_most_24():
    assert Padding((2, 4)).draw().count("\n") == 5
    assert Documents(torch.arange(3)).draw() == "■ · ·\n· ■ ·\n· · ■"
    assert Blocks(torch.ones(2, 3, dtype=torch.bool), 2).draw().splitlines()[0].count("■") == 6
    assert Near(torch.arange(100.0), 1).draw().count("\n") == 23
    assert Near(torch.tensor(1.0), 0).draw().count("\n") == 11


def test_documents_of_one_argument_are_queries_and_keys_of_the_same_tokens():
    ids = torch.tensor([5, 5, 7])
    both = Documents(ids).over(weights(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))._call.whole())
    assert both[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_a_padding_of_lengths_is_that_of_its_tuple():
    q, k = torch.randn(2, 2, 1, 3, 4).unbind(0)
    one, other = (weights(q, k, mask=Padding(x)).dense() for x in ((3, 1), torch.tensor([3, 1])))
    assert torch.equal(one, other)
    assert torch.equal(one[1, 0] > 0, torch.tensor([True, False, False]).expand(3, 3))
